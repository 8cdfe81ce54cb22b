"""Where tensors live and who does the arithmetic on them: ``host`` (the C kernels) or a framework's device."""

from trainmon.backend.base import Backend, Lazy, PackedRead

__all__ = ["Backend", "Lazy", "PackedRead"]
