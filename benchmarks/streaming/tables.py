"""What ``benchmarks/streaming/compare.py`` has found, as tables and curves."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from benchmarks.streaming.learners import Factory, Learner, Sideways
from benchmarks.streaming.runs import (
    COMPARED_EVERY,
    EXACT,
    NUM_WINDOWS,
    PARTIME,
    SELDOM,
    STASH,
    Run,
    Setting,
)
from benchmarks.streaming.sources import SOURCES, Frames, Source, change
from penstock.core.versions import DoubleBuffer, Place, Stash
from penstock.drawing.chart import line_chart

DRAWN = (EXACT, SELDOM, PARTIME, STASH)
LEARNED_AT = 0.03
TICK_SECONDS = 0.08
"""T of the table of frame rates: one device takes so long to learn from a frame."""


class Best(NamedTuple):
    """A method at its best learning rate, one run a seed."""

    runs: tuple[Run, ...]

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return fmean(run.loss for run in self.runs)

    @property
    def late(self) -> float:
        """Mean over seeds."""
        return fmean(run.late for run in self.runs)

    @property
    def spread(self) -> float:
        """Half of the range over seeds."""
        losses = [run.loss for run in self.runs]
        return (max(losses) - min(losses)) / 2

    @property
    def cosines(self) -> list[float]:
        """By stage, the mean over seeds; 1 where gradients are exact."""
        columns = zip(*(run.cosines for run in self.runs), strict=True)
        found = [fmean(column) for column in columns]
        return found or [1.0] * self.setting.num_stages

    @property
    def curve(self) -> list[float]:
        """Mean over seeds."""
        return [fmean(window) for window in zip(*(run.curve for run in self.runs), strict=True)]

    @property
    def setting(self) -> Setting:
        """That of the first seed."""
        return self.runs[0].setting

    @property
    def rate(self) -> str:
        """The learning rate; "÷ age" if it is divided."""
        return f"{self.setting.rate:g}{' ÷ age' if self.setting.divided else ''}"


Findings = dict[tuple[str, str, str], Best]
"""By source, optimizer and method."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, numbers to the right."""
    ruler = "|".join(["---", *("--:" for _ in heads[1:])])
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, *rows)).replace(
        "\n", f"\n|{ruler}|\n", 1
    )


def tables(streams: dict[str, Frames], findings: Findings, options: Namespace) -> Iterator[str]:
    """What was found."""
    age = 2 * (options.stages - 1)
    heads = ("stream", "‖x_t − x_{t−1}‖/‖x_t‖", f"‖x_t − x_{{t−{age}}}‖/‖x_t‖", "nothing learned")
    rows = []
    for name, frames in streams.items():
        source = SOURCES[name]
        gauges = [f"{change(frames, distance):.2f}" for distance in (1, age)]
        rows.append([source.title, *gauges, f"{source.nothing_learned(frames):.4f}"])
    yield table(heads, rows)
    yield f"Cosine of partime while weights rest, stages 0 … {options.stages - 1}"
    rows = [
        [SOURCES[name].title, written(at_rest(SOURCES[name], frames, options.stages))]
        for name, frames in streams.items()
    ]
    yield table(("stream", PARTIME), rows)
    for optimizer in options.optimizers:
        yield f"Prequential loss, {optimizer}: mean ± half of the range of seeds (second half)"
        rows = [_losses(name, optimizer, findings, options.methods) for name in streams]
        yield table(("stream", *options.methods), rows)
        yield f"Cosine to the exact gradient, stages 0 … {options.stages - 1}, {optimizer}"
        shown = [method for method in options.methods if method not in (EXACT, SELDOM)]
        rows = [_cosines(name, optimizer, findings, shown) for name in streams]
        yield table(("stream", *shown), rows)
        yield f"Learning rate, {optimizer}"
        rows = [
            [SOURCES[name].title, *(findings[name, optimizer, m].rate for m in options.methods)]
            for name in streams
        ]
        yield table(("stream", *options.methods), rows)
    yield "What is held, in multiples of the model, and frames per second"
    heads = ("method", "weights", "graphs", "devices", "frames/s seen", "frames/s learned from")
    yield table(heads, [row for row in _costs(options.stages) if row[0] in options.methods])


def _losses(source: str, optimizer: str, findings: Findings, methods: Sequence[str]) -> list[str]:
    own = {method: findings[source, optimizer, method] for method in methods}
    real = [best.loss for method, best in own.items() if method != EXACT]
    cells = []
    for best in own.values():
        cell = f"{best.loss:.4f} ± {best.spread:.4f} ({best.late:.4f})"
        cells.append(f"**{cell}**" if real and best.loss == min(real) else cell)
    return [SOURCES[source].title, *cells]


def _cosines(source: str, optimizer: str, findings: Findings, methods: Sequence[str]) -> list[str]:
    every = [findings[source, optimizer, method].cosines for method in methods]
    return [SOURCES[source].title, *map(written, every)]


def written(cosines: Sequence[float]) -> str:
    """Numbers for a cell."""
    return " ".join(f"{value:.2f}" for value in cosines).replace("-", "−")


def _costs(num_stages: int) -> list[list[str]]:
    """Versions and graphs by the policies' formulas, for equal stages; rates if a stage takes
    T/N and hops take nothing."""
    places = [Place(stage, num_stages, num_stages - 1 - stage) for stage in range(num_stages)]
    graphs = fmean(place.warm_up + 1 for place in places)

    def weights(policy: Stash | DoubleBuffer) -> float:
        return fmean(policy.versions_held(place) for place in places)

    one, every = 1 / TICK_SECONDS, num_stages / TICK_SECONDS
    rows: list[tuple[str, float, float, int, float, float]] = [
        (EXACT, 1, 1, 1, every, every),
        (SELDOM, 1, 1, 1, one, one),
        (PARTIME, 1, 1, num_stages, every, every),
        (STASH, weights(Stash()), graphs, num_stages, every, every),
        ("2BW", weights(DoubleBuffer()), graphs, num_stages, every, every),
    ]
    return [[name, *(f"{value:g}" for value in values)] for name, *values in rows]


def picture(findings: Findings, source: str, optimizer: str, num_frames: int) -> str:
    """Prequential curves of one stream as SVG."""
    middles = [(index + 0.5) * num_frames / NUM_WINDOWS for index in range(NUM_WINDOWS)]
    series = [
        (method, list(zip(middles, findings[source, optimizer, method].curve, strict=True)))
        for method in DRAWN
    ]
    return line_chart(series, "frame", f"prequential loss, {SOURCES[source].title}, {optimizer}")


def at_rest(source: Source, frames: Frames, num_stages: int) -> list[float]:
    """By stage, the cosine of partime's gradients while weights rest, so that only frames change:
    on the second half of a stream, of whose first half the model has learned exactly."""

    def sgd(rate: float) -> Factory:
        return lambda own, stage: torch.optim.SGD(own, lr=rate)

    model, half = source.build(0), len(frames) // 2
    exact = Learner(model, num_stages, source.loss, sgd(LEARNED_AT))
    for number, frame in enumerate(frames[:half]):
        exact.see(number, *frame, False)
    partime = Sideways(model, num_stages, source.loss, sgd(0.0))
    for number, frame in enumerate(frames[half:]):
        partime.see(number, *frame, number % COMPARED_EVERY == 0)
    return [fmean(kept) for kept in partime.cosines]
