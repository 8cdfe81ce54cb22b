"""MindFormers' GRAPH trainer: a callback of MindSpore that knows the trainer and what its step returns."""
