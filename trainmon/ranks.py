"""The other ranks, as the engine sees them: what is merged, compared and exchanged with them, until they are lost.

Everything here happens on all ranks at the same point of their programs, or on none. A rank that is lost is lost for all
of them within the group's timeout; from then on this rank is alone, and nobody waits again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from trainmon.backend import Backend
from trainmon.config import TrainMonitorConfig
from trainmon.dist import Group, Lost, Merging
from trainmon.events import Layout, ModelView
from trainmon.frame import Floats, Frame, Registry
from trainmon.messages import Told
from trainmon.pieces import LayerWatcher, share_layers, share_pieces
from trainmon.rankwise import RankWise
from trainmon.replicas import Check, Replicas
from trainmon.spread import RankSpread
from trainmon.voice import Voice

__all__ = ["Ranks"]


class Ranks:
    """Those that report together.

    Args:
        voice: says what is found out here.
        on_lost: learns why the ranks were lost, once.

    Attributes:
        group: the ranks.
        alone: nothing is started with others or waited for any more.
    """

    def __init__(self, group: Group, voice: Voice, on_lost: Callable[[str], None]) -> None:
        self.group, self.alone = group, False
        self._voice, self._on_lost = voice, on_lost
        voice.rank, voice.size, voice.travels = group.rank, group.size, lambda: self.merge
        self._shared: tuple[str, ...] | None = None  # parameters whose owners are known
        self._rankwise: RankWise | None = None
        self._replicas: Replicas | None = None
        self._unread_said = False

    @property
    def merge(self) -> bool:
        """Whether there are others to merge with."""
        return self.group.size > 1 and not self.alone

    def configure(self, config: TrainMonitorConfig, backend: Backend, model: ModelView | None) -> None:
        """What is compared, as the configuration has it."""
        comparison, replicas, several = config.comparison, config.replicas, self.group.size > 1
        self._rankwise = RankWise(comparison, self.group) if comparison is not None and several else None
        wanted = replicas is not None and several and model is not None
        self._replicas = Replicas(replicas, self.group, backend) if replicas and wanted else None

    def lose(self, lost: Lost) -> None:
        """The others can't be reached: said once."""
        if not self.alone:
            self.alone = True
            text = f"{lost}: values of all ranks are null from now on (training goes on if it can)"
            self._voice.now(Told("error", "ranks_lost", text, self._voice.step))
            self._on_lost(str(lost))

    def exchange(self, message: bytes) -> list[bytes] | None:
        """Everybody's message by rank; None if the ranks are lost."""
        try:
            return self.group.exchange(message)
        except Lost as lost:
            self.lose(lost)
            return None

    def of_rank_0(self, message: bytes) -> bytes:
        """What rank 0 has to say to all; this rank's own where it can't be asked."""
        everybody = self.exchange(message) if self.merge else None
        return message if everybody is None else everybody[0]

    # -- layouts ----------------------------------------------------------------------------------------------------

    def freeze(self, registry: Registry, *, first: bool) -> None:
        """Fixes a layout, the same on all ranks.

        Raises:
            ValueError: the ranks measure different things; only the first time, later they part.
        """
        everybody = self.exchange(registry.describe()) if self.merge else None
        try:
            registry.freeze(everybody or [])
        except ValueError as error:
            if first:
                raise
            self.lose(Lost(str(error)))
            registry.freeze()
        if self._rankwise is not None:
            self._rankwise.register(registry)

    def share(self, model: ModelView | None, watchers: Sequence[LayerWatcher], layout: Layout) -> None:
        """Of ranks that hold the same piece of a parameter one owns it; and of ranks that see the same tokens in the same
        part of a layer."""
        if not self.merge:
            return
        self._shared = None if model is None else tuple(model.parameter_names())
        try:
            pieces = None if model is None else share_pieces(model, self.group)
            if watchers:
                share_layers(watchers, layout, self.group)
        except Lost as lost:
            self.lose(lost)
            return
        if self._replicas is not None and model is not None and pieces is not None:
            self._replicas.register(model.parameter_names(), pieces)

    def moved(self, model: ModelView | None) -> bool:
        """Whether the model has other parameters than those whose owners are known."""
        return self.merge and model is not None and tuple(model.parameter_names()) != self._shared

    # -- reports ----------------------------------------------------------------------------------------------------

    def look_at_replicas(self, step: int, model: ModelView | None) -> Check | None:
        """Begins a check of what replicas hold, if it is time."""
        if self._replicas is None or model is None or not self.merge:
            return None
        check = self._replicas.look(step, model)
        if check is not None and check.problem and not self._unread_said:
            self._unread_said = True
            text = f"replicas: this rank's weights can't be compared with the others': {check.problem}"
            self._voice.say("warning", "replicas_not_read", text, step=step)
        return check

    def start(self, frame: Frame, check: Check | None, prints: Floats | None) -> Merging | None:
        """A report goes off to the others, with what is compared beside it; None without others."""
        if not self.merge:
            return None
        try:
            merging = self.group.merge(*frame.pack())
            if self._rankwise is not None:
                self._rankwise.start(frame)
            if self._replicas is not None and check is not None and prints is not None:
                self._replicas.start(check, prints)
        except Lost as lost:
            self.lose(lost)
            return None
        return merging

    def finish(self, frame: Frame, merging: Merging | None) -> bool:
        """Whether the frame holds what all ranks have.

        Raises:
            ValueError: the ranks were not at the same step.
        """
        if merging is None or self.alone:
            return self.group.size == 1
        try:
            frame.unpack(*merging.wait())
        except Lost as lost:
            self.lose(lost)
            return False
        return True

    def compare(self, merged: bool) -> dict[str, RankSpread]:
        """What the ranks' own values say, in steps in which they were gathered; the same on every rank. Says who stands
        out, and which replicas differ."""
        spreads: dict[str, RankSpread] = {}
        try:
            if self._rankwise is not None:
                spreads = self._rankwise.finish(merged)
                found = self._rankwise.stand_out(spreads)
                self._voice.everywhere([_stands_out(*one, self._voice.step) for one in found])
            for one in self._replicas.finish(merged) if self._replicas is not None else ():
                told = Told("error", "replicas_differ", str(one), one.step, asdict(one))
                self._voice.now(told) if self.group.rank == 0 else self._voice.send(told)
        except Lost as lost:
            self.lose(lost)
        return spreads

    def close(self) -> None:
        """Gives the group's resources back; what is said from now on, this rank says itself."""
        if not self.alone:
            self.group.close()
        self.alone = True


def _stands_out(name: str, rank: int, spread: RankSpread, step: int) -> Told:
    text = (
        f"{name} of rank {rank} stands out among {spread.known} ranks: the median is {spread.median:.6g}, the least "
        f"{spread.low:.6g} (rank {spread.low_rank}), the most {spread.high:.6g} (rank {spread.high_rank})"
    )
    return Told("warning", "rank_stands_out", text, step, {"series": name, "rank": rank, **asdict(spread)})
