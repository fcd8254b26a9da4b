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
whole stream, is confirmed on the other seed, or else the next one whose loss is not half as high
again there. Everything computes on one thread, in the order of the recurrences, so no figure
depends on how fast the machine is.

Runs that are in the folder's results.jsonl already are not repeated (all of them take half an hour
on one core). ``--quick`` learns from thirty frames of everything and keeps nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from benchmarks.streaming.runs import (
    METHODS,
    OPTIMIZERS,
    RATES,
    Book,
    Run,
    Setting,
)
from benchmarks.streaming.sources import SOURCES, Frames, Source
from benchmarks.streaming.tables import DRAWN, Best, Findings, picture, tables

BLOWN_UP = 1.5
"""Times the loss of the first seed: with so high a loss on another one, a rate is no choice."""
PICTURED = ("slow", "video")
"""The streams whose curves are drawn."""
FOLDER = Path(__file__).parents[2] / "docs" / "streams"


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
    confirmed = []
    for best in sorted(tried, key=loss_of):
        others = [replace(best.setting, seed=seed) for seed in size.seeds[1:]]
        confirmed.append(Best((best, *(book.run(source, frames, other) for other in others))))
        if max(map(loss_of, confirmed[-1].runs)) <= BLOWN_UP * best.loss:
            return confirmed[-1]
    return min(confirmed, key=lambda found: found.loss)


def loss_of(run: Run) -> float:
    """What the learning rate is chosen by."""
    return run.loss


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
            if name not in PICTURED:
                continue
            svg = picture(findings, name, optimizer, size.num_frames)
            (options.folder / f"{name}-{optimizer}.svg").write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
