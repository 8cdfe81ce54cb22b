"""Rows of single tensors of a torch model, each time they are seen: calls of modules, gradients, weights, moments.

Nothing of it decides what is written; it hands names and readings to whoever keeps the rows. Hooks look at one flag and
are done outside the steps that are looked at; they hold no tensor, and what goes wrong in them stays with them.
"""

from trainmon.adapters.torch_rows.host import TorchRows

__all__ = ["TorchRows"]
