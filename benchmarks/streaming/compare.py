"""Who learns best from a live stream that comes faster than one device can learn?

    python -m benchmarks.streaming.compare [--quick] [--sources slow video] [--optimizers sgd]

A frame comes every T/N, where T is what one device takes to learn from one. What could be done:

exact          online descent on every frame: a device that is N times as fast. Nobody has it; it is
               what all others would like to be.
exact, 1 of N  online descent on every N-th frame: what one device really manages. The opponent.
partime        N devices; gradients go through the graphs of newer frames. One version, one graph.
stash          N devices, PipeDream with an update per frame. Stage s holds N−s versions and graphs.
2BW            N devices, PipeDream-2BW with an update per N frames. Two versions, N−s graphs.

What counts is the prequential loss: of each frame that is seen, before it is learned from. Every
method tries the same learning rates on the first seed, one beyond where the best is at the edge,
both with the rates of stage s divided by max(1, 2(N−1−s)) and not; the best, by the mean over the
whole stream, is confirmed on the other seed. Everything computes on one thread, in the order of the
recurrences, so no figure depends on how fast the machine is.

Runs that are in the folder's results.jsonl already are not repeated (all of them take about twenty
minutes on one core). ``--quick`` learns from thirty frames of everything and keeps nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from rich.console import Console

from benchmarks.streaming.learners import Factory, Learner, Sideways
from benchmarks.streaming.runs import (
    COMPARED_EVERY,
    EXACT,
    METHODS,
    NUM_WINDOWS,
    OPTIMIZERS,
    PARTIME,
    RATES,
    SELDOM,
    STASH,
    Book,
    Run,
    Setting,
)
from benchmarks.streaming.sources import SOURCES, Frames, Source, change
from penstock.drawing.chart import line_chart
from penstock.versions import DoubleBuffer, Place, Stash

FOLDER = Path(__file__).parents[2] / "docs" / "streams"
DRAWN = (EXACT, SELDOM, PARTIME, STASH)
LEARNED_AT = 0.03
TICK_SECONDS = 0.08
"""T of the table of frame rates: one device takes so long to learn from a frame."""


class Size(NamedTuple):
    """How much is learned.

    Attributes:
        num_frames: of a stream.
        seeds: of weights; the first chooses the learning rate.
        num_rates: how many are tried.
    """

    num_frames: int = 600
    seeds: tuple[int, ...] = (0, 1)
    num_rates: int | None = None


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


def find(
    source: Source, frames: Frames, method: str, num_stages: int, optimizer: str, size: Size,
    book: Book,
) -> Best:  # fmt: skip
    """Choose the learning rate and whether it is divided on the first seed, and confirm."""
    first = size.seeds[0]

    def run(rate: float, divided: bool) -> Run:
        setting = Setting(
            source.name, method, num_stages, optimizer, rate, divided, first, len(frames)
        )
        return book.run(source, frames, setting)

    tried = []
    for divided in (False, True):
        runs = [run(rate, divided) for rate in RATES[optimizer][: size.num_rates]]
        best = min(runs, key=loss_of)
        beyond = {runs[0]: 1 / 3, runs[-1]: 3}.get(best)
        if beyond is not None and len(runs) > 1:
            runs.append(run(best.setting.rate * beyond, divided))
        tried += runs
    best = min(tried, key=loss_of)
    confirmed = [
        book.run(source, frames, replace(best.setting, seed=seed)) for seed in size.seeds[1:]
    ]
    return Best((best, *confirmed))


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


def loss_of(run: Run) -> float:
    """What the learning rate is chosen by."""
    return run.loss


Findings = dict[tuple[str, str, str], Best]
"""By source, optimizer and method."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, numbers to the right."""
    ruler = "|".join(["---", *("--:" for _ in heads[1:])])
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, *rows)).replace(
        "\n", f"\n|{ruler}|\n", 1
    )


def tables(
    streams: dict[str, Frames], findings: Findings, options: argparse.Namespace
) -> Iterator[str]:
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


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--stages", type=int, choices=(1, 2, 4, 8), default=4)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of results and pictures")
    parser.add_argument("--quick", action="store_true", help="a few frames; nothing is kept")
    return parser.parse_args()


def main() -> None:
    """Everything, or a little of everything."""
    options = parsed()
    torch.set_num_threads(1)
    console = Console(width=160)
    size = Size(30, (0,), 1) if options.quick else Size()
    book = Book(None if options.quick else options.folder / "results.jsonl")
    findings: Findings = {}
    streams: dict[str, Frames] = {}
    for name in options.sources:
        source = SOURCES[name]
        if not source.available:
            console.print(f'{name} is left out: pip install "penstock[video]"')
            continue
        frames = streams[name] = source.make(size.num_frames)
        search = partial(find, source, frames, size=size, book=book)
        for optimizer in options.optimizers:
            for method in options.methods:
                best = search(method, options.stages, optimizer)
                findings[name, optimizer, method] = best
                console.log(f"{name}, {optimizer}, {method}: {best.loss:.4f} at {best.rate}")
    for shown in tables(streams, findings, options):
        print(f"\n{shown}")
    if not options.quick and set(DRAWN) <= set(options.methods):
        for name, optimizer in {(name, optimizer) for name, optimizer, _ in findings}:
            svg = picture(findings, name, optimizer, size.num_frames)
            (options.folder / f"{name}-{optimizer}.svg").write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
