"""The plain PyTorch loop."""

from trainmon.adapters.torch_loop.loop import TorchLoop, attach

__all__ = ["TorchLoop", "attach"]
