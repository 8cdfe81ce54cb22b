"""What msProbe's older monitor has beside rows of tensors: alerts, structure, stacks, directions, features, names.

Everything is off unless its key says otherwise, and costs nothing then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainmon.backend.base import Floats, Lazy
from trainmon.backend.statistics import Fetched, Reading
from trainmon.msprobe.alarms import Alarms, pipeline_stage
from trainmon.msprobe.config import FACTS, Mode, MonitorSettings
from trainmon.msprobe.host import AddRow, Chosen, FeatureHooks, Hooks, MoreHost, StructureHooks
from trainmon.msprobe.naming import ShortNames, Target, picked, row_filter
from trainmon.msprobe.older_settings import HOOKS, FeatureSettings, OlderSettings
from trainmon.msprobe.output import MonitorTable
from trainmon.msprobe.saying import logger, warn
from trainmon.msprobe.tables import Clock, Rows
from trainmon.ops import csv_rows
from trainmon.sinks.base import publish

__all__ = ["Older"]

#: Columns of each kind of features.
_COLUMNS = {
    "attention_hook": ("entropy", "softmax_max"),
    "linear_hook": ("stable_rank", "sr_v1", "kernel_norm"),
    "moe_router_weight_hook": ("router_weight_similarity",),
    "moe_router_logit_hook": ("per_token_expert_entropy",),
}
_DIRECTION = "mg_direction"


class Older:
    """At work on one rank.

    Args:
        failed: takes what goes wrong here.

    Attributes:
        clock: numbers rows in the order in which they come; None: nobody wants to know.
    """

    def __init__(self, settings: OlderSettings, mode: Mode, failed: Callable[[Exception], None]) -> None:
        self._settings, self._mode, self._failed = settings, mode, failed
        self.clock = Clock() if settings.alert is not None else None
        self._alarms: Alarms | None = None
        self._names: ShortNames | None = None
        self._more: MoreHost | None = None
        self._structure: StructureHooks | None = None
        self._stacks: StructureHooks | None = None
        self._features: list[FeatureHooks] = []
        self._directions: list[tuple[str, int, Lazy]] = []
        self._directs = False
        self._redundant: frozenset[str] = frozenset()
        self._watches: dict[str, Callable[[int, Rows, Floats], None]] = {}
        self._output, self._rank = Path(), 0

    # -- what monitors look at --------------------------------------------------------------------------------------

    def chosen(self, settings: MonitorSettings, otherwise: Chosen) -> Chosen:
        """Which names have rows: those of the targets, where there are any."""
        targets = self._targets(settings)
        if settings.kind == "module" and self._settings.everything:
            return lambda name: True
        if targets is None or settings.kind == "cc":
            return otherwise
        return picked(targets, exactly=settings.kind == "module")

    def _targets(self, settings: MonitorSettings) -> Mapping[str, Target] | None:
        """A monitor's own, of either form, else those of all monitors; None: there are none by exact name."""
        own = settings.named is not None or settings.targets
        return settings.named if own else self._settings.targets

    def leave_out(self, more: MoreHost, context: Mapping[str, Any]) -> None:
        """Before the monitors begin: what other ranks of ``dp_group`` and ``tp_group`` show has no rows here."""
        self._redundant = frozenset()
        if self._mode is not Mode.V2:
            self._redundant = more.redundant(context.get("dp_group"), context.get("tp_group"))

    def shown(self, settings: MonitorSettings, chosen: Chosen) -> Chosen | None:
        """Which names have rows of what the ranks of a group have alike; None: those that are chosen anyway."""
        redundant = self._redundant
        if not redundant or settings.kind in ("module", "cc"):
            return None
        return lambda name: name not in redundant and chosen(name)

    def filtered(self, settings: MonitorSettings, add: AddRow) -> AddRow:
        """What takes a module's rows, if only some of them are wanted."""
        targets = None if self._settings.everything else self._targets(settings)
        wanted = row_filter(targets, self._settings.passes)
        if settings.kind != "module" or wanted is None:
            return add

        def add_some(name: str, scope: str, stage: int, micro: int, reading: Reading, call: int = 0) -> None:
            if wanted(name, scope):
                add(name, scope, stage, micro, reading, call)

        return add_some

    # -- beginning and end ------------------------------------------------------------------------------------------

    def begin(
        self,
        more: MoreHost,
        rank: int,
        output: Path,
        monitors: Mapping[str, Chosen],
        settings: Sequence[MonitorSettings],
        micros: int,
        context: Mapping[str, Any],
        goes_on: bool = False,
    ) -> None:
        """Hooks what is wanted.

        Args:
            more: what the host shows beside rows.
            monitors: which names have rows, by kind.
            micros: micro-batches of a step.
            goes_on: the run has begun before.
        """
        self._output, self._rank, self._more = output, rank, more
        own = self._settings
        if own.alert is not None:
            self._alarms = Alarms(
                own.alert,
                output,
                rank,
                micros=micros,
                pipeline=pipeline_stage(context.get("pp_stage")),
                micro_known=self._mode is Mode.EXTENDED,
                goes_on=goes_on,
                failed=self._failed,
            )
        facts = [one for one in settings if set(one.ops) & set(FACTS)]
        wanted = {
            "print_struct": own.structure != "no",
            "stack_info": own.stacks,
            _DIRECTION: own.directions,
            "recording_l2_features": own.features is not None,
        }
        lacking = {key for key in more.lacks if wanted[key]}
        if lacking:
            warn(f"{', '.join(sorted(lacking))}: not built for this framework or mode; ignored")
        if facts:
            more.describe(frozenset(one.eps for one in facts if "zeros" in one.ops))
        if own.squash:
            self._names = ShortNames(*more.names())
        if own.structure != "no" and "print_struct" not in lacking:
            self._structure = more.structure()
        if own.stacks and "stack_info" not in lacking:
            self._stacks = more.stacks(monitors.get("module", lambda name: True))
        if own.features is not None and "recording_l2_features" not in lacking:
            self._features = list(_features(more, own.features))
        self._directs = own.directions and _DIRECTION not in lacking
        for hooks in self._all_hooks():
            hooks.install()

    @property
    def ends_training(self) -> bool:
        """Whether the training ends after its first step."""
        return self._settings.structure == "exit"

    def leave(self, step: int, more: MoreHost) -> None:
        """Ends the training, on all ranks together, those that are not watched too.

        Raises:
            SystemExit: always.
        """
        more.together()
        logger.warning("[monitor_v2] the training ends after step %d: print_struct is 'exit'", step)
        raise SystemExit(0)

    def end(self) -> None:
        """Takes all hooks away."""
        for hooks in self._all_hooks():
            try:
                hooks.remove()
            except Exception as error:
                self._failed(error)
        self._structure = self._stacks = self._more = None
        self._features, self._directions = [], []
        if self._alarms is not None:
            self._alarms.close()
            self._alarms, self._watches = None, {}

    def _all_hooks(self) -> list[Hooks]:
        return [one for one in (self._structure, self._stacks, *self._features) if one is not None]

    # -- a step -----------------------------------------------------------------------------------------------------

    def arm(self, due: bool, over: bool) -> None:
        """A step begins."""
        if self.clock is not None:
            self.clock.restart()
        self._directions = []
        if self._structure is not None:
            self._structure.arm(True)
        for hooks in (self._stacks, *self._features):
            if hooks is not None:
                if over:
                    hooks.remove()
                else:
                    hooks.arm(due)

    def before_update(self) -> None:
        """Gradients are there, moments are as they were. Called in steps that are looked at."""
        if self._directs and self._more is not None:
            try:
                self._directions = self._more.directions()
            except Exception as error:
                self._failed(error)

    def complete(self) -> list[Lazy]:
        """The step's own numbers, which are read with its rows."""
        lazies = [lazy for _, _, lazy in self._directions]
        for hooks in self._features:
            try:
                lazies += [lazy for *_, lazy in hooks.complete()]
            except Exception as error:
                self._failed(error)
        return lazies

    def tables(self, span: tuple[int, int], fetched: Fetched) -> list[MonitorTable]:
        """Tables of the step beside the monitors'."""
        steps = f"step{span[0]}-{span[1]}"
        tables = []
        if self._directions:
            found = list(self._directions)
            tables.append(
                MonitorTable(
                    f"{_DIRECTION}_{steps}",
                    len(found),
                    lambda: self._direction_rows(found, fetched),
                    (_DIRECTION,),
                    (),
                )
            )
        for hooks in self._features:
            if hooks.rows:
                tables.append(self._feature_table(hooks.kind, list(hooks.rows), steps, fetched))
        return tables

    def ended(self, step: int) -> bool:
        """A step is over. Files of what is seen once are written.

        Returns:
            Whether the training ends now: the structure has been written, and ``print_struct`` is ``exit``.
        """
        if self._stacks is not None and self._stacks.found:
            stacks, self._stacks = self._stacks, None
            stacks.remove()
            columns = {"module_name": list(stacks.found), "stack_info": list(stacks.found.values())}
            self._write(
                self._output / f"rank_{self._rank}" / "stack_info.csv", csv_rows(columns, header=True)
            )
        if self._structure is None or not self._structure.found:
            return False
        structure, self._structure = self._structure, None
        structure.remove()
        path = self._output / "module_struct" / f"rank{self._rank}" / "module_struct.json"
        self._write(path, json.dumps(structure.found, indent=4).encode())
        logger.info("[monitor_v2] the structure of the model is in %s", path)
        return self.ends_training

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(path, content)
        except OSError as error:
            self._failed(error)

    # -- tables -----------------------------------------------------------------------------------------------------

    def watch(self, settings: MonitorSettings) -> Callable[[int, Rows, Floats], None] | None:
        """What looks at a monitor's rows when they are written."""
        if self._alarms is None:
            return None
        if settings.key not in self._watches:
            self._watches[settings.key] = self._alarms.watch(settings.kind, settings.ops)
        return self._watches[settings.key]

    def finish(self, settings: MonitorSettings, rows: Rows, fetched: Fetched) -> Rows:
        """Rows with short names and with what their tensors are, where that is wanted."""
        if self._names is not None:
            pairs = zip(rows.names, rows.scopes, strict=True)
            rows.names = [self._names.of(settings.kind, name, scope) for name, scope in pairs]
        for op in settings.ops:
            if op in FACTS:
                rows.more[op] = _fact(op, rows.readings, settings.eps, fetched)
        return rows

    def _direction_rows(
        self, found: Iterable[tuple[str, int, Lazy]], fetched: Fetched
    ) -> tuple[Rows, Floats]:
        rows = Rows()
        shares = []
        for name, stage, lazy in found:
            same, opposite, n = fetched.numbers(lazy).reshape(-1)[:3]
            shares.append(((same - opposite) / n + 1) / 2 if n else np.nan)
            short = name if self._names is None else self._names.of("param", name, "")
            rows.add(short, _DIRECTION, stage, 0, _NOTHING)
        rows.more[_DIRECTION] = np.array(shares)
        return rows, np.empty((len(rows), 0))

    def _feature_table(
        self, kind: str, found: list[tuple[str, int, int, Lazy]], steps: str, fetched: Fetched
    ) -> MonitorTable:
        columns = _COLUMNS[kind]

        def finish() -> tuple[Rows, Floats]:
            rows = Rows()
            values = np.array([fetched.numbers(lazy).reshape(-1)[: len(columns)] for *_, lazy in found])
            for name, stage, micro, _ in found:
                short = name if self._names is None else self._names.module(name)
                rows.add(short, kind, stage, micro + 1, _NOTHING)
            rows.more.update(zip(columns, values.T, strict=True))
            return rows, np.empty((len(rows), 0))

        keys = ("micro_step",) if found[0][2] >= 0 else ()
        return MonitorTable(f"{kind}_{steps}", len(found), finish, columns, keys)


#: In place of a reading, in rows that have none.
_NOTHING = Reading(np.empty(0), 0)


def _fact(op: str, readings: Sequence[Reading], eps: float, fetched: Fetched) -> Any:
    facts = [one.facts for one in readings]
    if op == "shape":
        return [None if one is None else str(one.shape) for one in facts]
    if op == "dtype":
        return [None if one is None else one.dtype for one in facts]
    if op == "id":
        return [None if one is None else str(one.identity) for one in facts]
    shares = [1.0 if one is None else one.zeros.get(eps, np.nan) for one in facts]
    return np.array([float(fetched.numbers(one)[0]) if isinstance(one, Lazy) else one for one in shares])


def _features(more: MoreHost, settings: FeatureSettings) -> Iterable[FeatureHooks]:
    for kind in HOOKS:
        hooks, missing = more.features(kind, settings.targets.get(kind), settings.sequence_first)
        if missing:
            warn(f"l2_targets.{kind}: no module is called {', '.join(missing)}")
        yield hooks
