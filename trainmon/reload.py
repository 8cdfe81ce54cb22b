"""A configuration that changes under way: from the file that rank 0 looks at to what all ranks take at one step."""

from __future__ import annotations

import json

from trainmon.config import ConfigError, ConfigWatch, TrainMonitorConfig, load_config
from trainmon.events import TrainBegin
from trainmon.messages import Told
from trainmon.ranks import Ranks
from trainmon.supervision import check_health
from trainmon.voice import Voice

__all__ = ["Reload"]


class Reload:
    """Attributes:
    agreed: what all ranks take when their next step begins.
    """

    def __init__(self, watch: ConfigWatch) -> None:
        self._watch = watch
        self._proposed: TrainMonitorConfig | None = None  # rank 0 has read it
        self.agreed: TrainMonitorConfig | None = None

    @property
    def proposes(self) -> bool:
        """Whether this rank has something new for the others."""
        return self._proposed is not None

    def look(self, begin: TrainBegin, voice: Voice) -> None:
        """Rank 0 looks whether the configuration's file has changed; one that is wrong is said and ignored."""
        if voice.rank != 0 or self._proposed is not None:
            return
        try:
            new = self._watch.poll()
            if new is not None and new.health is not None:
                check_health(new.health, begin)
        except ConfigError as error:
            text = f"the changed configuration is ignored, the old one goes on:\n{error}"
            voice.now(Told("warning", "config_ignored", text, voice.step))
            return
        self._proposed = new
        if self._watch.ignored:
            names = ", ".join(self._watch.ignored)
            text = f"the configuration's changes of {names} take effect when a run begins, not in this one"
            voice.now(Told("warning", "config_fixed", text, voice.step))

    def agree(self, ranks: Ranks) -> None:
        """Rank 0 has proposed something: all ranks learn of it in the same report. Alone it is agreed at once."""
        proposed, self._proposed = self._proposed, None
        if not ranks.merge:
            self.agreed = proposed or self.agreed
            return
        everybody = ranks.exchange(b"" if proposed is None else json.dumps(proposed.to_dict()).encode())
        if everybody is not None:
            self.agreed = load_config(json.loads(everybody[0]))

    def take(self) -> TrainMonitorConfig | None:
        """What was agreed, once."""
        agreed, self.agreed = self.agreed, None
        return agreed
