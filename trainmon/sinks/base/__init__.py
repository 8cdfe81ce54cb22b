"""What all sinks share: their contract, whole-record files, and how names, numbers and values are spelled."""

from trainmon.sinks.base.contract import Cadence, Matches, Message, RunInfo, Sink, at_least, literal
from trainmon.sinks.base.files import RecordFile, Unwritten, publish
from trainmon.sinks.base.spread import QUANTILES, ordered, quantiles
from trainmon.sinks.base.tables import (
    aligned,
    by_probe,
    column,
    file_stem,
    table_files,
    table_subjects,
    table_tag,
)
from trainmon.sinks.base.tags import TAG_STYLES, tag
from trainmon.sinks.base.text import (
    long_time,
    percent,
    scientific,
    short_number,
    short_time,
    significant,
    whole_number,
)
from trainmon.sinks.base.values import plain

__all__ = [
    "QUANTILES",
    "TAG_STYLES",
    "Cadence",
    "Matches",
    "Message",
    "RecordFile",
    "RunInfo",
    "Sink",
    "Unwritten",
    "aligned",
    "at_least",
    "by_probe",
    "column",
    "file_stem",
    "literal",
    "long_time",
    "ordered",
    "percent",
    "plain",
    "publish",
    "quantiles",
    "scientific",
    "short_number",
    "short_time",
    "significant",
    "table_files",
    "table_subjects",
    "table_tag",
    "tag",
    "whole_number",
]
