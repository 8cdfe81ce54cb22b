"""Rows of single tensors of a MindSpore model in PyNative mode, each time they are seen; in GRAPH mode of its state.

Nothing of it decides what is written; it hands names and readings to whoever keeps the rows. Hooks hold no tensor, what
goes wrong in them stays with them, and where ``@jit`` compiles them with a model they do nothing.
"""

from trainmon.adapters.mindspore_rows.host import MindSporeRows

__all__ = ["MindSporeRows"]
