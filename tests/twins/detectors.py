"""The twins of the detectors: each rule read off its definition, with whole histories instead of sliding state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# (verdict, score, limit), or None: nothing to say.
Finding = tuple[str, float, float] | None


class Twin:
    """One rule on one series; `see` takes a finite value."""

    def __init__(self, **parameters: float) -> None:
        self.p = parameters
        self.seen: list[float] = []
        self.run = 0

    def see(self, x: float) -> Finding:
        finding = self.judge(x)
        self.seen.append(x)
        return finding

    def judge(self, x: float) -> Finding:
        raise NotImplementedError

    def last(self, window: float) -> Any:
        return np.array(self.seen[-int(window) :])

    def count(self, flagged: bool) -> int:
        self.run = self.run + 1 if flagged else 0
        return self.run


class Threshold(Twin):
    def judge(self, x: float) -> Finding:
        high = self.p["above"] is not None and x >= self.p["above"]
        low = self.p["below"] is not None and x <= self.p["below"]
        if self.count(high or low) >= self.p["patience"]:
            return "flag", x, self.p["above"] if high else self.p["below"]
        return None


class GlobalNormSpike(Twin):
    def judge(self, x: float) -> Finding:
        if self.count(x >= self.p["threshold"]) == 0:
            return None
        return "stop" if self.run >= self.p["count"] else "flag", x, self.p["threshold"]


class KillLossSpike(Twin):
    def judge(self, x: float) -> Finding:
        window, finding = int(self.p["window"]), None
        if len(self.seen) >= window and self.last(window).mean() > 0:
            limit = self.p["factor"] * self.last(window).mean()
            if self.count(x >= limit):
                finding = "stop" if self.run > self.p["patience"] else "flag", x, limit
        history = [*self.seen, x]
        if len(history) >= 2 * window and (finding is None or finding[0] != "stop"):
            cap = min(max(history[:window]), self.p["cap"])
            share = np.mean(np.array(history[-window:]) > cap)
            if share >= 0.5:
                return "high", float(share), 0.5
        return finding


class Sigma(Twin):
    def score(self, x: float, history: Any, ddof: int) -> float:
        if not x > history.mean():
            return -math.inf
        deviation = history.std(ddof=ddof)
        return float((x - history.mean()) / deviation) if deviation > 0 else math.inf


class SkipStepSigma(Sigma):
    def judge(self, x: float) -> Finding:
        if len(self.seen) < self.p["warmup"]:
            return None
        score = self.score(x, self.last(self.p["window"]), 1)
        return ("flag", score, self.p["k"]) if score > self.p["k"] else None


class StabilityScore(Sigma):
    flags: list[bool]

    def judge(self, x: float) -> Finding:
        self.flags = getattr(self, "flags", [])
        score = -math.inf
        if len(self.seen) >= self.p["window"]:
            score = self.score(x, self.last(self.p["window"]), 0)
        self.flags.append(score > self.p["k"])
        return ("flag", score, self.p["k"]) if self.flags[-1] else None

    def share(self) -> float:
        return sum(self.flags[-int(self.p["span"]) :]) / self.p["span"]


class SpikeRtol(Twin):
    def judge(self, x: float) -> Finding:
        if len(self.seen) < self.p["window"] or x <= self.seen[-1]:
            return None
        mean = self.last(self.p["window"]).mean()
        distance = abs(x - mean)
        if mean > 0 and distance >= self.p["rtol"] * mean:
            return "flag", distance, self.p["rtol"] * mean
        if mean > 0 and self.p["atol"] is not None and distance >= self.p["atol"]:
            return "flag", distance, self.p["atol"]
        return None


class MegatronMax(Twin):
    def judge(self, x: float) -> Finding:
        samples = int(self.p["samples"])
        if len(self.seen) < samples:
            return None
        limit = self.p["factor"] * max(abs(value) for value in self.seen[:samples])
        return ("flag", abs(x), limit) if limit > 0 and abs(x) >= limit else None


class ZClip(Twin):
    def judge(self, x: float) -> Finding:
        warmup, finding, g = int(self.p["warmup"]), None, x
        if len(self.seen) < warmup:
            return None
        if len(self.seen) == warmup:
            self.mean, self.var = np.mean(self.seen), np.var(self.seen)
        deviation = math.sqrt(self.var)
        z = (x - self.mean) / (deviation + 1e-6)
        if z > self.p["z"]:
            finding = "flag", z, self.p["z"]
            g = self.mean + self.p["z"] ** 2 * deviation / z
        a = self.p["alpha"]
        self.mean = a * self.mean + (1 - a) * g
        self.var = a * self.var + (1 - a) * (g - self.mean) ** 2
        return finding


class AdaGC(Twin):
    def see(self, x: float) -> Finding:
        return super().see(x) if x > 0 else None

    def judge(self, x: float) -> Finding:
        warmup, factor, beta = int(self.p["warmup"]), self.p["factor"], self.p["beta"]
        if len(self.seen) < warmup:
            return None
        if len(self.seen) == warmup:
            self.gamma = min(min(1.0, 1.0 / norm) * norm for norm in self.seen)
        limit = factor * self.gamma
        self.gamma = beta * self.gamma + (1 - beta) * min(1.0, limit / x) * x
        return ("flag", x, limit) if x > limit else None


class Turbulence(Twin):
    def judge(self, x: float) -> Finding:
        if not self.seen:
            self.average = abs(x)
            return None
        limit = (1 + self.p["theta"]) * self.average
        self.average = self.p["beta"] * self.average + (1 - self.p["beta"]) * abs(x)
        return ("flag", abs(x), limit) if abs(x) > limit else None


def floor(spread: float, level: float) -> float:
    return max(spread, 1e-6 * abs(level), 1e-12)


class Robust(Twin):
    """The window of accepted values that `mad` and `cusum` keep."""

    outlier = "k"

    def see(self, x: float) -> Finding:
        if self.p["log"]:
            if x <= 0:
                return None
            x = math.log(x)
        if self.p.get("down"):
            x = -x
        if not hasattr(self, "window"):
            self.window: list[float] = []
            self.pending: list[float] = []
        if len(self.window) < self.p["warmup"]:
            self.accept(x)
            return None
        self.middle = float(np.median(self.window))
        self.spread = floor(float(np.median(np.abs(np.array(self.window) - self.middle))), self.middle)
        shifted = False
        score = 0.6745 * (x - self.middle) / self.spread
        flagged = score > self.p[self.outlier]
        if not flagged:
            self.accept(x)
        else:
            self.pending.append(x)
            if len(self.pending) == self.p["shift"]:
                self.window, self.pending, shifted = self.pending[-int(self.p["window"]) :], [], True
        return self.say(x, score, flagged, shifted)

    def accept(self, x: float) -> None:
        self.window = [*self.window, x][-int(self.p["window"]) :]
        self.pending = []

    def say(self, x: float, score: float, flagged: bool, shifted: bool) -> Finding:
        return ("shift" if shifted else "flag", score, self.p["k"]) if flagged else None


class Cusum(Robust):
    outlier = "outlier"
    sum = 0.0

    def say(self, x: float, score: float, flagged: bool, shifted: bool) -> Finding:
        total = max(0.0, self.sum + (x - self.middle) / (1.4826 * self.spread) - self.p["k"])
        self.sum = 0.0 if shifted or total > self.p["h"] else total
        if shifted:
            return "shift", total, self.p["h"]
        return ("flag", total, self.p["h"]) if total > self.p["h"] else None


class Ewma(Twin):
    n, mean, var = 0, 0.0, 0.0

    def see(self, x: float) -> Finding:
        finding = None
        if self.p["log"]:
            if x <= 0:
                return None
            x = math.log(x)
        spread = floor(math.sqrt(self.var), self.mean)
        if self.n >= self.p["warmup"] and x - self.mean > self.p["k"] * spread:
            finding = "flag", (x - self.mean) / spread, self.p["k"]
            if self.count(True) < self.p["shift"]:
                return finding
            finding, self.n = ("shift", *finding[1:]), 0
        self.run = 0
        self.n += 1
        if self.n == 1:
            self.mean, self.var = x, 0.0
            return finding
        weight, distance = max(self.p["alpha"], 1 / self.n), x - self.mean
        self.mean += weight * distance
        self.var = (1 - weight) * (self.var + weight * distance**2)
        return finding


class DeadExpert(Twin):
    def judge(self, x: float) -> Finding:
        age = self.count(x <= self.p["share"])
        return ("flag", age, self.p["age"]) if age >= self.p["age"] else None


class Straggler(Twin):
    def judge(self, x: float) -> Finding:
        slow = [value < self.p["below"] for value in [*self.seen, x][-int(self.p["reports"]) :]]
        return ("flag", sum(slow), self.p["hits"]) if slow[-1] and sum(slow) >= self.p["hits"] else None


class Linearity(Twin):
    def judge(self, x: float) -> Finding:
        window = [*self.seen, x][-int(self.p["window"]) :]
        if len(window) < self.p["window"] or np.median(window) >= self.p["below"]:
            return None
        return "flag", float(np.median(window)), self.p["below"]


TWINS: dict[str, Callable[..., Twin]] = {
    "threshold": Threshold,
    "global_norm_spike": GlobalNormSpike,
    "kill_loss_spike": KillLossSpike,
    "skip_step_sigma": SkipStepSigma,
    "stability_score": StabilityScore,
    "spike_rtol": SpikeRtol,
    "megatron_max": MegatronMax,
    "zclip": ZClip,
    "adagc": AdaGC,
    "turbulence": Turbulence,
    "mad": Robust,
    "cusum": Cusum,
    "ewma": Ewma,
    "dead_expert": DeadExpert,
    "straggler": Straggler,
    "linearity": Linearity,
}
