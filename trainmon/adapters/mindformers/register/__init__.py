"""The folder that MindFormers' REGISTER_PATH names: it holds nothing but the module for ``auto_register``."""
