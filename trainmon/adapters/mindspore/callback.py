"""The callback that turns ``Model.train`` and ``Model.fit`` into events.

Gives: train, epoch, step and evaluation events, loss and what else the step returns, learning rates of the step,
samples; in PyNative gradients as the optimizer gets them and the time of the update; in GRAPH norms of gradients and
counts of what is not finite in them, before clipping. Can't give: micro-batches, forward and backward times, the wait
for data; in GRAPH the elements of gradients and the time of the update. Stops by ``request_stop``, raises out of a
hook; can't skip a step.
"""

from __future__ import annotations

from typing import Any

from trainmon.adapters.mindspore_parts.callback import ModelCallback
from trainmon.monitor import TrainMonitor

__all__ = ["MindSporeMonitor"]


class MindSporeMonitor(ModelCallback):
    """``model.train(epochs, data, callbacks=[trainmon.MindSporeMonitor("monitor.yaml")])``; of ``fit`` too.

    Put it last in the list, behind callbacks that may stop or save. A second ``train`` with the same object is
    another run.

    Args:
        config: path of a YAML or JSON file (a host's, with ``callbacks:``, or trainmon's own), a mapping, or None
            for the defaults.
        resumed_step: the last step that an earlier life finished. None: what the host says (``initial_step``), or the
            epochs that ``initial_epoch`` leaves out.
        clips: whether the training step cell clips gradients before its optimizer gets them. None: MindSpore's own
            don't, any other may: then PyNative shows norms after clipping, and the norm before only if the cell
            returns it.
        **overrides: top-level configuration keys.

    Attributes:
        monitor: the engine of the running or last run.

    Raises:
        ConfigError: the configuration is wrong, or a rule asks for what can't be done here; nothing has begun.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        resumed_step: int | None = None,
        clips: bool | None = None,
        **overrides: Any,
    ) -> None:
        super().__init__(lambda: TrainMonitor(config, **overrides), resumed_step, clips)
