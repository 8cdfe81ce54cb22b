"""The black box: what a rank did last, readable after any death. Written by the engine on every rank; see ``layout``."""

from trainmon.sinks.blackbox.layout import BOX
from trainmon.sinks.blackbox.merge import RankView, Verdict, merge_boxes
from trainmon.sinks.blackbox.phases import COLLECT, GATE, GATED, MERGE, MERGED
from trainmon.sinks.blackbox.reader import Box, find_boxes, read_box
from trainmon.sinks.blackbox.writer import BlackBox

__all__ = [
    "BOX",
    "COLLECT",
    "GATE",
    "GATED",
    "MERGE",
    "MERGED",
    "BlackBox",
    "Box",
    "RankView",
    "Verdict",
    "find_boxes",
    "merge_boxes",
    "read_box",
]
