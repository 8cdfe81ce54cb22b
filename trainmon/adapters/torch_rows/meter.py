"""Readings of torch tensors of any kind: host memory in C, devices by their backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trainmon.adapters.torch_parts.shards import is_dtensor, local
from trainmon.backend import Backend
from trainmon.backend.base import STATISTICS, Lazy
from trainmon.backend.host import HostBackend
from trainmon.backend.statistics import Facts, Reading, host_readings, of_zeros, with_zeros

__all__ = ["Meter"]

_PLAIN = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16}
    | {torch.int8, torch.uint8, torch.bool}
)


#: Elements that are compared at once.
_PIECE = 1 << 18


class Meter:
    """Reads tensors.

    Args:
        as_msprobe: leave undefined what msProbe can't compute: extremes of float8 and of complex numbers, all but the
            norm of sparse tensors; of complex numbers the real parts alone count.
        modulus: complex numbers are read as their absolute values.

    Attributes:
        backend: of the first device that a tensor was on; None: all were on the host.
        distances: readings say what the tensor is, and which share of it is nearer to zero than each of these; None: they
            don't.
    """

    def __init__(self, *, as_msprobe: bool = False, modulus: bool = False) -> None:
        self._as_msprobe, self._modulus = as_msprobe, modulus
        self.backend: Backend | None = None
        self._host = HostBackend()
        self.distances: frozenset[float] | None = None

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Reading]:
        """One reading a tensor, of what it holds now."""
        readings = self._read(tensors)
        if self.distances is None:
            return readings
        with torch.no_grad():
            return [
                replace(reading, facts=self._facts(tensor, self.distances))
                for tensor, reading in zip(tensors, readings, strict=True)
            ]

    def _facts(self, tensor: torch.Tensor, distances: frozenset[float]) -> Facts:
        here = local(tensor.detach())
        zeros = {one: self._near_zero(here, one) for one in distances}
        return Facts(tuple(here.shape), str(here.dtype), id(tensor), zeros)

    def _near_zero(self, tensor: torch.Tensor, distance: float) -> float | Lazy:
        """The share of elements nearer to zero; a piece at a time, so that nothing of the tensor's size is made."""
        count = tensor.numel()
        if not count or tensor.is_meta:
            return float("nan")
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        absent = 0
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce().values()
            absent = (count - tensor.numel()) if distance > 0 else 0
        elif tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        found = [_nearer(one, distance) for one in torch.split(flat, _PIECE)]
        near = torch.stack(found).sum() + absent
        if not _is_on_device(tensor):
            return float(near) / count
        return self.backend_of(tensor).scalar(near.double() / count)

    def backend_of(self, tensor: torch.Tensor) -> Backend:
        """Where numbers of a tensor are computed."""
        if not _is_on_device(tensor):
            return self._host
        if self.backend is None:
            from trainmon.backend.torch import TorchBackend

            self.backend = TorchBackend(tensor.device)
        return self.backend

    def _read(self, tensors: Sequence[torch.Tensor]) -> list[Reading]:
        if all(_is_plain(one) for one in tensors):
            return self._host_readings(tensors) if tensors else []
        with torch.no_grad():
            return self._read_any([local(one.detach()) for one in tensors])

    def _read_any(self, tensors: Sequence[torch.Tensor]) -> list[Reading]:
        found: list[Reading | None] = [None] * len(tensors)
        here = [at for at, one in enumerate(tensors) if _is_plain(one)]
        there = [at for at, one in enumerate(tensors) if _is_on_device(one)]
        for places, read in ((here, self._host_readings), (there, self._device_readings)):
            if places:
                readings = read([tensors[at] for at in places])
                for at, reading in zip(places, readings, strict=True):
                    found[at] = reading
        return [one if one is not None else self._special(tensors[at]) for at, one in enumerate(found)]

    def _host_readings(self, tensors: Sequence[torch.Tensor]) -> list[Reading]:
        readings = host_readings(tensors)
        if self._as_msprobe:
            # Which zero is the least of several depends on how torch goes through a tensor.
            for tensor, reading in zip(tensors, readings, strict=True):
                if tensor.is_floating_point():
                    _sign_zeros(reading, tensor)
        return readings

    def _device_readings(self, tensors: Sequence[torch.Tensor]) -> list[Reading]:
        lazy = self.backend_of(tensors[0]).statistics(tensors)
        return [Reading(lazy, row) for row in range(len(tensors))]

    def _special(self, tensor: torch.Tensor) -> Reading:
        if tensor.is_meta:
            return replace(of_zeros(tensor.numel()), undefined=STATISTICS[1:])
        if tensor.is_nested:
            return self._one(tensor.values())
        if tensor.layout is torch.sparse_coo:
            return self._sparse(tensor)
        if tensor.layout is not torch.strided:
            return self._one(tensor.to_dense())
        if tensor.is_complex():
            return self._complex(tensor.resolve_conj())
        if tensor.is_quantized:
            return self._one(tensor.dequantize())
        reading = self._one(tensor.float() if tensor.device.type != "cpu" else tensor)
        return replace(reading, undefined=("min", "max")) if self._as_msprobe else reading

    def _one(self, tensor: torch.Tensor) -> Reading:
        if _is_on_device(tensor):
            return self._device_readings([tensor])[0]
        if _is_plain(tensor):
            return self._host_readings([tensor])[0]
        if tensor.device.type == "cpu":
            return host_readings([tensor])[0]
        return self._special(tensor)

    def _sparse(self, tensor: torch.Tensor) -> Reading:
        if self._as_msprobe:
            stored = self.read([tensor.double().coalesce().values()])[0]
            return replace(stored, undefined=("min", "max", "mean"))
        if tensor.device.type != "cpu":
            return self.read([tensor.to_dense()])[0]
        values = _summed(tensor)
        return with_zeros(self.read([values])[0], tensor.numel() - values.numel())

    def _complex(self, tensor: torch.Tensor) -> Reading:
        if self._modulus:
            return self._one(tensor.abs())
        tensor = tensor.cpu()  # no kernel of a device's backend takes them
        real = replace(self._one(tensor.real), undefined=("min", "max"))
        if self._as_msprobe:
            return real
        norm = self._one(torch.view_as_real(tensor))
        return replace(real, others=(("norm", norm), ("nans", _of_flags(tensor.isnan()))))


def _nearer(tensor: torch.Tensor, distance: float) -> torch.Tensor:
    if tensor.dtype is torch.bool:
        return (~tensor).sum() if 0 < distance <= 1 else torch.tensor(tensor.numel() * int(distance > 1))
    if tensor.dtype not in _PLAIN and not tensor.is_complex():
        tensor = tensor.float()
    return (tensor.abs() < distance).sum()


def _sign_zeros(reading: Reading, tensor: torch.Tensor) -> None:
    record = reading.source[reading.row]  # type: ignore[index]
    for name, extreme in (("min", torch.min), ("max", torch.max)):
        if record[name] == 0.0:
            record[name] = float(extreme(tensor.detach()))


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse tensor, those at the same place added in the order in which they came, as its dense form
    has them; ``coalesce`` takes another order."""
    if tensor.is_coalesced():
        return tensor.values()
    stored = tensor._values()
    places, place = torch.unique(tensor._indices(), dim=1, return_inverse=True)
    shape = (places.shape[1], *stored.shape[1:])
    return torch.sparse_coo_tensor(place[None], stored, shape, check_invariants=False).to_dense()


def _of_flags(flags: torch.Tensor) -> Reading:
    """A reading whose ``nans`` is how many flags are set."""
    counted = of_zeros(flags.numel())
    counted.source["n_nan"] = int(flags.sum())  # type: ignore[index]
    return counted


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype in _PLAIN
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not is_dtensor(tensor)
        and not tensor.is_nested
    )


def _is_on_device(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype in _PLAIN
        and tensor.device.type not in ("cpu", "meta")
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )
