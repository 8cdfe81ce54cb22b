from tests.hosts.hyperparallel.runtime_g3 import get_device_type, get_torch_device, synchronize

__all__ = ["get_device_type", "get_torch_device", "synchronize"]
