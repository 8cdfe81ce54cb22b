"""Arrays in, numbers out: the typed front of the compiled kernels, one module a kernel family.

Every function takes one array or any iterable of arrays (a generator too), leaves its inputs alone, and reads
each element once. An array is, in the order in which the doors are tried: a NumPy array of native byte order
(ml_dtypes' bfloat16 and float8 types included), an object whose type has DLPack's C exchange table (torch),
an object with `__dlpack__`, a buffer (bytes, memoryview, array.array), or a pair `(buffer, dtype name)`.
Anything else, and memory that the host can't address, is a TypeError that names the position in the list.
"""

from __future__ import annotations

from trainmon.ops.attention import attention_logit_mean, attention_logits
from trainmon.ops.attention_records import (
    AttentionLogits,
    AttentionRows,
    QKClip,
    merge_key_splits,
    qk_clip,
)
from trainmon.ops.comparison import COMPARISON_DTYPE, Comparison, Place, compare
from trainmon.ops.detectors import (
    EVENT_DTYPE,
    RULES,
    VERDICTS,
    Detection,
    Detector,
    DetectorBank,
)
from trainmon.ops.differences import Difference, TensorDifferences, diff_norm
from trainmon.ops.fingerprints import Fingerprint, file_digest, fingerprint
from trainmon.ops.histograms import CastLosses, ExponentHistogram, exponent_histogram, underflow_shares
from trainmon.ops.info import build_info, cpu_info
from trainmon.ops.losses import LossAccumulator, loss_gap, position_buckets
from trainmon.ops.moe import assign_churn, bias_saturated, bias_span, expert_load, expert_migration
from trainmon.ops.moe_metrics import ExpertMetrics, ExpertState, expert_metrics
from trainmon.ops.norms import multi_norm, plain_read
from trainmon.ops.rows import csv_rows, json_rows
from trainmon.ops.scan import NonFinite, scan_nonfinite
from trainmon.ops.signs import SignAgreement, sign_agreement
from trainmon.ops.spectral import Spectral, merge_spectral, stable_rank
from trainmon.ops.spikes import SpikeClass, classify_spike
from trainmon.ops.staging import Staged, stage, stage_size
from trainmon.ops.stats import STATS_DTYPE, SUMMARY_DTYPE, finish_stats, merge_stats, tensor_stats

__all__ = [
    "COMPARISON_DTYPE",
    "Comparison",
    "Place",
    "compare",
    "STATS_DTYPE",
    "SUMMARY_DTYPE",
    "CastLosses",
    "AttentionLogits",
    "AttentionRows",
    "EVENT_DTYPE",
    "RULES",
    "VERDICTS",
    "Detection",
    "Detector",
    "DetectorBank",
    "Difference",
    "ExponentHistogram",
    "ExpertMetrics",
    "ExpertState",
    "LossAccumulator",
    "NonFinite",
    "QKClip",
    "SignAgreement",
    "SpikeClass",
    "TensorDifferences",
    "assign_churn",
    "attention_logit_mean",
    "attention_logits",
    "bias_saturated",
    "bias_span",
    "Spectral",
    "build_info",
    "cpu_info",
    "classify_spike",
    "csv_rows",
    "diff_norm",
    "expert_load",
    "expert_metrics",
    "expert_migration",
    "exponent_histogram",
    "Fingerprint",
    "Staged",
    "file_digest",
    "fingerprint",
    "finish_stats",
    "json_rows",
    "loss_gap",
    "merge_key_splits",
    "merge_spectral",
    "merge_stats",
    "multi_norm",
    "plain_read",
    "position_buckets",
    "qk_clip",
    "scan_nonfinite",
    "sign_agreement",
    "stage",
    "stage_size",
    "stable_rank",
    "tensor_stats",
    "underflow_shares",
]
