"""trainmon: a training monitor for large models, and its kernels as functions on arrays.

Everything here is loaded on first use: ``import trainmon`` loads neither NumPy nor the compiled extension.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers take it for typing's, whose import costs more than all else here
if TYPE_CHECKING:
    from typing import Any

    from trainmon.adapters.hyperparallel import attach_hyperparallel as attach_hyperparallel
    from trainmon.adapters.mindformers.graph import GraphMonitor as GraphMonitor
    from trainmon.adapters.mindformers.pynative import PyNativeMonitor as PyNativeMonitor
    from trainmon.adapters.mindformers_path import register_path as register_path
    from trainmon.adapters.mindspore import MindSporeMonitor as MindSporeMonitor
    from trainmon.adapters.torch_loop import attach as attach
    from trainmon.backend.determinism import Determinism as Determinism
    from trainmon.backend.determinism import deterministic as deterministic
    from trainmon.config import ConfigError as ConfigError
    from trainmon.config import load_config as load_config
    from trainmon.health import TrainingStopped as TrainingStopped
    from trainmon.monitor import TrainMonitor as TrainMonitor
    from trainmon.ops import AttentionLogits as AttentionLogits
    from trainmon.ops import AttentionRows as AttentionRows
    from trainmon.ops import CastLosses as CastLosses
    from trainmon.ops import Comparison as Comparison
    from trainmon.ops import Detection as Detection
    from trainmon.ops import Detector as Detector
    from trainmon.ops import DetectorBank as DetectorBank
    from trainmon.ops import Difference as Difference
    from trainmon.ops import ExpertMetrics as ExpertMetrics
    from trainmon.ops import ExpertState as ExpertState
    from trainmon.ops import ExponentHistogram as ExponentHistogram
    from trainmon.ops import Fingerprint as Fingerprint
    from trainmon.ops import LossAccumulator as LossAccumulator
    from trainmon.ops import NonFinite as NonFinite
    from trainmon.ops import QKClip as QKClip
    from trainmon.ops import SignAgreement as SignAgreement
    from trainmon.ops import Spectral as Spectral
    from trainmon.ops import SpikeClass as SpikeClass
    from trainmon.ops import Staged as Staged
    from trainmon.ops import TensorDifferences as TensorDifferences
    from trainmon.ops import assign_churn as assign_churn
    from trainmon.ops import attention_logit_mean as attention_logit_mean
    from trainmon.ops import attention_logits as attention_logits
    from trainmon.ops import bias_saturated as bias_saturated
    from trainmon.ops import bias_span as bias_span
    from trainmon.ops import build_info as build_info
    from trainmon.ops import classify_spike as classify_spike
    from trainmon.ops import compare as compare
    from trainmon.ops import cpu_info as cpu_info
    from trainmon.ops import csv_rows as csv_rows
    from trainmon.ops import diff_norm as diff_norm
    from trainmon.ops import expert_load as expert_load
    from trainmon.ops import expert_metrics as expert_metrics
    from trainmon.ops import expert_migration as expert_migration
    from trainmon.ops import exponent_histogram as exponent_histogram
    from trainmon.ops import file_digest as file_digest
    from trainmon.ops import fingerprint as fingerprint
    from trainmon.ops import finish_stats as finish_stats
    from trainmon.ops import json_rows as json_rows
    from trainmon.ops import loss_gap as loss_gap
    from trainmon.ops import merge_key_splits as merge_key_splits
    from trainmon.ops import merge_spectral as merge_spectral
    from trainmon.ops import merge_stats as merge_stats
    from trainmon.ops import multi_norm as multi_norm
    from trainmon.ops import position_buckets as position_buckets
    from trainmon.ops import qk_clip as qk_clip
    from trainmon.ops import scan_nonfinite as scan_nonfinite
    from trainmon.ops import sign_agreement as sign_agreement
    from trainmon.ops import stable_rank as stable_rank
    from trainmon.ops import stage as stage
    from trainmon.ops import stage_size as stage_size
    from trainmon.ops import tensor_stats as tensor_stats
    from trainmon.ops import underflow_shares as underflow_shares

_HOME = {
    "attach": "trainmon.adapters.torch_loop",
    "attach_hyperparallel": "trainmon.adapters.hyperparallel",
    "MindSporeMonitor": "trainmon.adapters.mindspore",
    "GraphMonitor": "trainmon.adapters.mindformers.graph",
    "PyNativeMonitor": "trainmon.adapters.mindformers.pynative",
    "register_path": "trainmon.adapters.mindformers_path",
    "Determinism": "trainmon.backend.determinism",
    "deterministic": "trainmon.backend.determinism",
    "ConfigError": "trainmon.config",
    "load_config": "trainmon.config",
    "TrainMonitor": "trainmon.monitor",
    "TrainingStopped": "trainmon.health",
    "CastLosses": "trainmon.ops",
    "AttentionLogits": "trainmon.ops",
    "AttentionRows": "trainmon.ops",
    "Comparison": "trainmon.ops",
    "Detection": "trainmon.ops",
    "Detector": "trainmon.ops",
    "DetectorBank": "trainmon.ops",
    "Difference": "trainmon.ops",
    "ExpertMetrics": "trainmon.ops",
    "ExpertState": "trainmon.ops",
    "ExponentHistogram": "trainmon.ops",
    "Fingerprint": "trainmon.ops",
    "LossAccumulator": "trainmon.ops",
    "NonFinite": "trainmon.ops",
    "SpikeClass": "trainmon.ops",
    "Staged": "trainmon.ops",
    "TensorDifferences": "trainmon.ops",
    "assign_churn": "trainmon.ops",
    "attention_logit_mean": "trainmon.ops",
    "attention_logits": "trainmon.ops",
    "bias_saturated": "trainmon.ops",
    "bias_span": "trainmon.ops",
    "QKClip": "trainmon.ops",
    "SignAgreement": "trainmon.ops",
    "Spectral": "trainmon.ops",
    "build_info": "trainmon.ops",
    "compare": "trainmon.ops",
    "classify_spike": "trainmon.ops",
    "cpu_info": "trainmon.ops",
    "csv_rows": "trainmon.ops",
    "diff_norm": "trainmon.ops",
    "expert_load": "trainmon.ops",
    "expert_metrics": "trainmon.ops",
    "expert_migration": "trainmon.ops",
    "exponent_histogram": "trainmon.ops",
    "file_digest": "trainmon.ops",
    "fingerprint": "trainmon.ops",
    "finish_stats": "trainmon.ops",
    "json_rows": "trainmon.ops",
    "loss_gap": "trainmon.ops",
    "merge_key_splits": "trainmon.ops",
    "merge_spectral": "trainmon.ops",
    "merge_stats": "trainmon.ops",
    "multi_norm": "trainmon.ops",
    "position_buckets": "trainmon.ops",
    "qk_clip": "trainmon.ops",
    "scan_nonfinite": "trainmon.ops",
    "sign_agreement": "trainmon.ops",
    "stage": "trainmon.ops",
    "stage_size": "trainmon.ops",
    "stable_rank": "trainmon.ops",
    "tensor_stats": "trainmon.ops",
    "underflow_shares": "trainmon.ops",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("trainmon")
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'trainmon' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
