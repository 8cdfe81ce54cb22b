"""Hosts: each adapter turns one kind of training loop into events, and knows nothing of what is measured."""
