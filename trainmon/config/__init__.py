"""The configuration of trainmon: one schema, three doors, errors that name file, line, column and key.

`load_config` is the way in. docs/config.md lists every key; it is written by `python -m trainmon.config`.
"""

from .bind import bind
from .errors import ConfigError, Place, Problem
from .fields import key, section
from .health import HealthConfig, RuleConfig, WebhookConfig, glob_pattern, may_match
from .load import load_config, load_labels, load_rules
from .schema import (
    Cadence,
    CsvSink,
    GradientsConfig,
    JsonlSink,
    LogSink,
    LossConfig,
    Selection,
    SinksConfig,
    TensorBoardSink,
    ThroughputConfig,
    TimingConfig,
    TrainMonitorConfig,
    Window,
)
from .watch import ConfigWatch, changed_sections

__all__ = [
    "Cadence",
    "ConfigError",
    "ConfigWatch",
    "CsvSink",
    "GradientsConfig",
    "HealthConfig",
    "JsonlSink",
    "LogSink",
    "LossConfig",
    "Place",
    "Problem",
    "RuleConfig",
    "Selection",
    "SinksConfig",
    "TensorBoardSink",
    "ThroughputConfig",
    "TimingConfig",
    "TrainMonitorConfig",
    "WebhookConfig",
    "Window",
    "bind",
    "changed_sections",
    "glob_pattern",
    "key",
    "load_config",
    "load_labels",
    "load_rules",
    "may_match",
    "section",
]
