"""Learns from one stream in one way, and keeps account of what was learned already."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from benchmarks.streaming.learners import (
    DoubleBuffered,
    Learner,
    Seldom,
    Sideways,
    Stashed,
    Told,
)
from benchmarks.streaming.sources import Frames, Source

NUM_WINDOWS = 30
"""Into how many parts of a stream a curve is averaged."""
COMPARED_EVERY = 10
"""A cosine is taken of every so many frames, of the second half of the stream."""
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
RATES = {"sgd": (0.01, 0.03, 0.1, 0.3), "adam": (0.0003, 0.001, 0.003, 0.01)}
"""The learning rates that every method tries."""


class Method(NamedTuple):
    """A row of the tables.

    Attributes:
        name: for people.
        learner: what it computes.
    """

    name: str
    learner: type[Learner]


EXACT, SELDOM, PARTIME, STASH = "exact", "exact, 1 of N", "partime", "stash"
METHODS = {
    method.name: method
    for method in (
        Method(EXACT, Learner),
        Method(SELDOM, Seldom),
        Method(PARTIME, Sideways),
        Method(STASH, Stashed),
        Method("2BW", DoubleBuffered),
    )
}


@dataclass(frozen=True)
class Setting:
    """What identifies a run.

    Attributes:
        source: its name.
        method: its name.
        num_stages: N.
        optimizer: its name.
        rate: learning rate.
        divided: whether the rate of stage s is divided by max(1, 2(N−1−s)).
        seed: of the weights.
        num_frames: in the stream.
    """

    source: str
    method: str
    num_stages: int
    optimizer: str
    rate: float
    divided: bool
    seed: int
    num_frames: int


@dataclass(frozen=True)
class Run:
    """What came out; losses are infinite if one was not finite.

    Attributes:
        setting: what was run.
        loss: prequential: the mean over the frames that were seen, each before it was learned from.
        late: the same of the second half of the stream.
        curve: the same of each thirtieth of the stream.
        cosines: by stage, the mean between applied and exact gradients; empty where all are exact.
    """

    setting: Setting
    loss: float
    late: float
    curve: tuple[float, ...]
    cosines: tuple[float, ...]


def learn(source: Source, frames: Frames, setting: Setting) -> Run:
    """Learn from the stream once, without a look back."""

    def optimizer(own: Any, stage: int) -> torch.optim.Optimizer:
        age = 2 * (setting.num_stages - 1 - stage) if setting.divided else 0
        return OPTIMIZERS[setting.optimizer](own, lr=setting.rate / max(1, age))

    method, model = METHODS[setting.method], source.build(setting.seed)
    learner = method.learner(model, setting.num_stages, source.loss, optimizer)
    told = _listened(learner, frames)
    if told is None:
        return Run(setting, math.inf, math.inf, (math.inf,) * NUM_WINDOWS, ())
    half = len(frames) // 2
    windows: list[list[float]] = [[] for _ in range(NUM_WINDOWS)]
    for frame, loss in told:
        windows[frame * NUM_WINDOWS // len(frames)].append(loss)
    return Run(
        setting,
        fmean(loss for _, loss in told),
        fmean(loss for frame, loss in told if frame >= half),
        tuple(fmean(window) if window else math.nan for window in windows),
        tuple(fmean(kept) for kept in learner.cosines if kept),
    )


def _listened(learner: Learner, frames: Frames) -> list[Told] | None:
    """What came out of all frames; ``None`` as soon as a loss is not finite."""
    told = []
    for number, (frame, target) in enumerate(frames):
        compare = number % COMPARED_EVERY == 0 and number >= len(frames) // 2
        seen = learner.see(number, frame, target, compare)
        if seen is not None:
            if not math.isfinite(seen.loss):
                return None
            told.append(seen)
    return told


class Book:
    """Runs by setting, one a line in a file that grows, so that a comparison can be taken up again
    where it was broken off."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._runs: dict[Setting, Run] = {}
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, kept: dict[str, Any]) -> None:
        setting = Setting(**kept["setting"])
        loss, late = (math.inf if kept[name] is None else kept[name] for name in ("loss", "late"))
        curve = tuple(math.nan if one is None else one for one in kept["curve"])
        self._runs[setting] = Run(setting, loss, late, curve, tuple(kept["cosines"]))

    def run(self, source: Source, frames: Frames, setting: Setting) -> Run:
        """The run of a setting, made now if it was not before."""
        if setting not in self._runs:
            made = self._runs[setting] = learn(source, frames, setting)
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a") as file:
                    file.write(_line(made) + "\n")
        return self._runs[setting]


def _line(run: Run) -> str:
    def rounded(value: float) -> float | None:
        return float(f"{value:.5g}") if math.isfinite(value) else None

    kept = {
        "setting": asdict(run.setting),
        "loss": rounded(run.loss),
        "late": rounded(run.late),
        "curve": [rounded(value) for value in run.curve],
        "cosines": [round(value, 3) for value in run.cosines],
    }
    return json.dumps(kept)
