"""The marks of the phase timeline: what a rank has reached, in the order of a step."""

from __future__ import annotations

from dataclasses import dataclass

from trainmon.events import (
    BackwardEnd,
    DataBegin,
    DataEnd,
    EvalBegin,
    EvalEnd,
    ExceptionRaised,
    ForwardEnd,
    GradsReady,
    Load,
    MicroEnd,
    OptimizerBegin,
    OptimizerEnd,
    Save,
    StepBegin,
    StepEnd,
    TrainEnd,
)

__all__ = [
    "COLLECT",
    "GATE",
    "GATED",
    "MERGE",
    "MERGED",
    "PHASES",
    "STEP_BEGIN",
    "STEP_END",
    "WAITING",
    "Phase",
    "code_of",
]


@dataclass(frozen=True, slots=True)
class Phase:
    """One kind of mark.

    Attributes:
        name: stable identifier.
        text: what the rank does from then on, for people; ``{}`` stands for the micro-batch.
        order: place within a micro-batch, or, from 100 on, behind all micro-batches of the step.
    """

    name: str
    text: str
    order: int


#: By code. Codes are part of the format and are never given anew.
PHASES: dict[int, Phase] = {
    1: Phase("step_begin", "step begun", 0),
    2: Phase("data_begin", "waits for data", 1),
    3: Phase("data_end", "has its data", 2),
    4: Phase("forward_end", "forward of micro-batch {} done", 3),
    5: Phase("backward_end", "backward of micro-batch {} done", 4),
    6: Phase("micro_end", "micro-batch {} done", 5),
    7: Phase("grads_ready", "gradients ready", 100),
    20: Phase("gate", "waits for other ranks before the update", 101),
    21: Phase("gated", "heard the other ranks before the update", 102),
    8: Phase("optimizer_begin", "in the optimizer", 103),
    9: Phase("optimizer_end", "optimizer done", 104),
    10: Phase("step_end", "step done", 105),
    11: Phase("merge", "waits for other ranks", 106),
    12: Phase("merged", "heard the other ranks", 107),
    13: Phase("collect", "reading values from the device", 108),
    14: Phase("eval_begin", "evaluating", 109),
    15: Phase("eval_end", "evaluation done", 110),
    16: Phase("save", "saving", 111),
    17: Phase("load", "loading", 112),
    18: Phase("exception", "left by an exception", 113),
    19: Phase("train_end", "training ended", 114),
}
STEP_BEGIN, STEP_END, MERGE, MERGED, COLLECT, GATE, GATED = 1, 10, 11, 12, 13, 20, 21
#: Marks behind which a rank waits for others.
WAITING = (MERGE, GATE)

#: By type of event.
code_of: dict[type, int] = {
    StepBegin: 1,
    DataBegin: 2,
    DataEnd: 3,
    ForwardEnd: 4,
    BackwardEnd: 5,
    MicroEnd: 6,
    GradsReady: 7,
    OptimizerBegin: 8,
    OptimizerEnd: 9,
    StepEnd: 10,
    EvalBegin: 14,
    EvalEnd: 15,
    Save: 16,
    Load: 17,
    ExceptionRaised: 18,
    TrainEnd: 19,
}
