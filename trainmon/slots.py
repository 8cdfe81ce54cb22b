"""Which probes a configuration asks for, and when each of them fires."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainmon.config import TrainMonitorConfig
from trainmon.probes.activations import ActivationsProbe
from trainmon.probes.alignment import AlignmentProbe
from trainmon.probes.attention import AttentionProbe
from trainmon.probes.base import Probe
from trainmon.probes.gradients import GradientsProbe
from trainmon.probes.loss import LossProbe
from trainmon.probes.loss_parts import LossPartsProbe
from trainmon.probes.moe import MoeProbe
from trainmon.probes.moments import MomentsProbe
from trainmon.probes.momentum import MomentumProbe
from trainmon.probes.optim import OptimProbe
from trainmon.probes.spectral import SpectralProbe
from trainmon.probes.throughput import ThroughputProbe
from trainmon.probes.timing import TimingProbe
from trainmon.probes.underflow import UnderflowProbe
from trainmon.probes.unreduced import UnreducedProbe
from trainmon.probes.updates import UpdatesProbe
from trainmon.probes.weights import WeightsProbe
from trainmon.schedule import Schedule

__all__ = ["Slot", "build_slots"]


@dataclass(slots=True)
class Slot:
    """A probe, when it fires, and what became of it.

    Attributes:
        schedule: its own; None: it is due whenever one of ``follows`` is.
        follows: slots before this one.
        always: sees every step, shown or not, because its totals count them all.
        due: whether this step is shown.
        failures: how often it raised.
        off: switched off for good.
        trouble: whether it raised in this step.
        stretch: it is looked at in one of so many steps of its schedule.
        wanted: whether the schedule asked for this step.
        spent_ns: nanoseconds inside it since they were last taken.
        fresh: its probe has not begun.
    """

    probe: Probe
    schedule: Schedule | None
    follows: tuple[Slot, ...] = ()
    always: bool = False
    due: bool = False
    failures: int = 0
    off: bool = False
    trouble: bool = False
    stretch: int = 1
    wanted: bool = False
    spent_ns: int = 0
    fresh: bool = True
    _passed: int = 0

    @property
    def title(self) -> str:
        """For messages: a section's second probe has a title of its own."""
        title: str = getattr(self.probe, "title", self.probe.name)
        return title

    @property
    def active(self) -> bool:
        """Whether it takes events in this step."""
        return not self.off and (self.due or self.always)

    @property
    def idle(self) -> bool:
        """Whether the probe has nothing to show on any rank: what it is due for needs no report."""
        return bool(getattr(self.probe, "idle", False))

    def arm(self, step: int) -> None:
        """A step begins; asked in the order of the slots."""
        if self.schedule is None:
            self.wanted = self.due = any(slot.due for slot in self.follows)
            return
        self.wanted = self.schedule.due(step)
        self.due = self.wanted and self._passed % self.stretch == 0
        self._passed += self.wanted


#: Top-level keys that sections inherit.
_INHERITED = frozenset({"every", "window", "target", "exclude", "invert"})


def build_slots(
    config: TrainMonitorConfig, keep: Sequence[Slot] = (), changed: Collection[str] = ()
) -> list[Slot]:
    """The probes of all sections that are on.

    Args:
        keep: the slots of an earlier configuration; what stands in sections that are not ``changed`` goes on.
    """
    slots = _all_slots(config)
    if not _INHERITED.isdisjoint(changed):
        return slots
    before = {(type(slot.probe), slot.title): slot for slot in keep if slot.probe.name not in changed}
    stands_for: dict[int, Slot] = {}
    for slot in slots:
        going_on = before.get((type(slot.probe), slot.title), slot)
        going_on.follows = tuple(stands_for[id(followed)] for followed in slot.follows)
        stands_for[id(slot)] = going_on
    return list(stands_for.values())


def _all_slots(config: TrainMonitorConfig) -> list[Slot]:
    slots: list[Slot] = []

    def add(probe: Probe, *, always: bool = False, every: int = 1) -> None:
        cadence = config.cadence(probe.name)
        window = cadence.window
        schedule = Schedule(
            math.lcm(cadence.every, every),
            start=window.start,
            stop=window.stop,
            interval=window.interval,
            count=window.count,
        )
        slots.append(Slot(probe, schedule, always=always))

    if config.loss is not None:
        loss = config.loss
        merged, apart = {"whole": loss.global_, "perplexity": loss.perplexity}, loss.own_every > 1
        if apart:
            add(LossProbe(**merged, micro=False, device=False))
        own = LossProbe(**merged, micro=loss.micro, device=loss.device, own=apart)
        add(own, every=loss.own_every)
        if loss.parts or loss.positions or loss.sources:
            add(LossPartsProbe(parts=loss.parts, positions=loss.positions, sources=loss.sources))
    if config.gradients is not None:
        gradients, selection = config.gradients, config.selection("gradients")
        some = selection.target is not None or bool(selection.exclude)
        add(
            GradientsProbe(
                selection,
                norm=gradients.norm,
                per_parameter=gradients.per_parameter,
                nonfinite=gradients.nonfinite,
                clipped=gradients.clipped,
                some=some,
            )
        )
        if gradients.underflow:
            add(UnderflowProbe(selection, gradients.underflow))
        whole = gradients.local or gradients.device
        if whole:
            unreduced = UnreducedProbe(
                selection,
                local=gradients.local,
                device=gradients.device,
                some=some,
                rare=gradients.own_every > 1,
            )
            add(unreduced, every=gradients.own_every)
        if gradients.micro or gradients.increment:
            add(
                UnreducedProbe(
                    selection,
                    micro=gradients.micro,
                    increment=gradients.increment,
                    says_unseen=not whole,
                ),
                every=gradients.micro_every,
            )
        if gradients.signs:
            add(MomentumProbe(selection))
        if gradients.align:
            add(AlignmentProbe(summed=gradients.reduction == "sum"))
    if slots:
        # The learning rate explains loss and gradients: it is shown when either is.
        slots.append(Slot(OptimProbe(), None, follows=tuple(slots)))
    if config.activations is not None:
        inner = config.activations
        add(ActivationsProbe(inner.flows, norm=inner.norm, absmax=inner.absmax, nonfinite=inner.nonfinite))
    if config.weights is not None:
        weights = config.weights
        add(
            WeightsProbe(
                config.selection("weights"),
                norm=weights.norm,
                per_parameter=weights.per_parameter,
                nonfinite=weights.nonfinite,
                source=weights.source,
            )
        )
    if config.moments is not None:
        moments = config.moments
        add(
            MomentsProbe(
                config.selection("moments"),
                norm=moments.norm,
                per_parameter=moments.per_parameter,
                negative=moments.negative,
            )
        )
    if config.attention is not None:
        attention = config.attention
        add(
            AttentionProbe(
                sample_rows=attention.rows or None, per_head=attention.per_head, tau=attention.qk_clip
            )
        )
    if config.updates is not None:
        updates = config.updates
        add(
            UpdatesProbe(
                config.selection("updates"),
                norm=updates.norm,
                ratio=updates.ratio,
                zero_share=updates.zero_share,
                per_parameter=updates.per_parameter,
                adam=updates.adam,
                source=updates.source,
            )
        )
    if config.moe is not None:
        moe = config.moe
        add(
            MoeProbe(
                per_expert=moe.per_expert,
                capacity_factor=moe.capacity_factor,
                ep_size=moe.ep_size,
                bias_cap=moe.bias_cap,
                placement=moe.placement,
                span=moe.span,
                hold=moe.hold,
                micros=moe.micros,
            )
        )
    if config.spectral is not None:
        spectral = config.spectral
        add(
            SpectralProbe(
                config.selection("spectral"),
                stable_rank=spectral.stable_rank,
                sigma=spectral.sigma,
                eigenvalue=spectral.eigenvalue,
                elements=spectral.elements,
                tolerance=spectral.tolerance,
                epsilon=spectral.epsilon,
            )
        )
    if config.throughput is not None:
        add(ThroughputProbe(), always=True)
    if config.timing is not None:
        add(TimingProbe(), always=True)
    return slots
