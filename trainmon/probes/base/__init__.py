"""What probes share: the contract with the engine, rows of per-tensor tables, sources of weights, the search for
non-finite values."""

from trainmon.probes.base.contract import Probe, ProbeContext, Sample, Say
from trainmon.probes.base.nonfinite import NonFiniteCount
from trainmon.probes.base.rows import Rows, Selected, contributing, owned_flags
from trainmon.probes.base.sources import Source, weights_of

__all__ = [
    "NonFiniteCount",
    "Probe",
    "ProbeContext",
    "Rows",
    "Sample",
    "Say",
    "Selected",
    "Source",
    "contributing",
    "owned_flags",
    "weights_of",
]
