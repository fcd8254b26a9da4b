"""Does it learn? Every remedy for delayed gradients, trained through the real engine.

    python -m benchmarks.learning.convergence [--quick] [--works gpt] [--stages 2 8]

A small GPT on text and a small CNN on digits, of eight layers each, are trained with 2, 4 and 8
stages in threads of one process, for the same number of updates of the same samples whatever the
method. Every method tries the same learning rates on seed 0, and half or twice the best one where
it is the lowest or highest; what is best then is confirmed on the other seeds. The held-out loss is
looked at every 25 updates, from copies of the weights, without interrupting the stream. Simulated
time is that of the plan when all layers cost the same and F = I = W; its unit is one device's time
for one update.

Runs that are in the results already are not repeated (all of them take about an hour on one core);
to measure afresh, give another --folder. ``--quick`` trains six updates of everything and keeps
nothing: it shows that it works. ``--longer 1000`` trains every method once more, on seed 0 for so
many updates at the learning rate that was best. ``--markdown`` prints tables for
docs/convergence.md. Pictures are drawn if no method is left out. The digits are scikit-learn's,
which is no dependency of Penstock.

loss ± spread  held-out, mean of the last three looks; mean over seeds ± half of their range
learning rate  the one that was best on seed 0
time to 1F1B's from when on the mean loss is as low as what 1F1B with AdamW has at its end, in
               updates of one device; – if it never is
less 1F1B's    the same looks beside 1F1B with AdamW when that has taken as long
"""

from __future__ import annotations

import argparse
import math
import platform
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.learning.methods import BY_NAME, METHODS, Method, times
from benchmarks.learning.pictures import Curve, picture
from benchmarks.learning.runs import RATES, Book, Run, Setting, train
from benchmarks.learning.works import WORKS, Work

FOLDER = Path(__file__).parents[2] / "docs" / "convergence"
UNITS = {"gpt": "nats per byte", "cnn": "nats per image (logarithmic)"}
BASELINE = "1F1B"
ROWS = [method.name for method in METHODS]


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        updates: of a run.
        every: from one look at the held-out loss to the next.
        seeds: the first one chooses the learning rate.
        num_rates: how many of the learning rates are tried.
    """

    updates: int = 250
    every: int = 25
    seeds: tuple[int, ...] = (0, 1, 2)
    num_rates: int | None = None


@dataclass(frozen=True)
class Found:
    """A method at its best learning rate.

    Attributes:
        method: which.
        runs: one per seed.
    """

    method: Method
    runs: tuple[Run, ...]

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return sum(run.last for run in self.runs) / len(self.runs)

    @property
    def spread(self) -> float:
        """Half of the range over seeds."""
        losses = [run.last for run in self.runs]
        return (max(losses) - min(losses)) / 2 if math.isfinite(max(losses)) else math.inf

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.runs[0].setting.rate

    @property
    def correct(self) -> float:
        """Part of held-out targets that are the most likely class, mean over seeds."""
        return sum(run.correct for run in self.runs) / len(self.runs)

    @property
    def curve(self) -> list[float]:
        """Mean held-out loss over seeds, at every look."""
        columns = zip(*(run.held_out for run in self.runs), strict=True)
        return [sum(column) / len(self.runs) for column in columns]


Findings = dict[tuple[str, int], Found]
"""By method and number of stages."""


def find(work: Work, method: Method, num_stages: int, size: Size, book: Book) -> Found:
    """Choose the learning rate on the first seed, and train with it on the others.

    Where the best one is the lowest or highest, one beyond it is tried too. What the number of
    stages makes no difference to is trained with two.
    """
    stages = 2 if method.same_for_all else num_stages

    def run(rate: float, seed: int) -> Run:
        setting = Setting(work.name, method.name, stages, rate, seed, size.updates, size.every)
        return book.run(setting, partial(train, work))

    first = size.seeds[0]
    tried = {rate: run(rate, first).last for rate in RATES[: size.num_rates]}
    best = min(tried, key=tried.__getitem__)
    beyond = {min(tried): best / 2, max(tried): best * 2}.get(best)
    if beyond is not None and len(tried) > 1:
        tried[beyond] = run(beyond, first).last
        best = min(tried, key=tried.__getitem__)
    return Found(method, tuple(run(best, seed) for seed in size.seeds))


def longer(work: Work, found: Found, num_stages: int, updates: int, size: Size, book: Book) -> Run:
    """One run on the first seed at the learning rate that was found, of more updates."""
    stages = 2 if found.method.same_for_all else num_stages
    first, every = size.seeds[0], max(1, updates // 10)
    setting = Setting(work.name, found.method.name, stages, found.rate, first, updates, every)
    return book.run(setting, partial(train, work))


def curve(found: Found, num_stages: int, size: Size) -> Curve:
    """Means over seeds by updates and by simulated time."""
    looks = range(0, size.updates + 1, size.every)
    ends = times(found.method, num_stages, size.updates)
    return Curve(found.method.name, looks, [ends[look] for look in looks], found.curve)


def time_to(loss: float, seen: Curve) -> float | None:
    """From when on a curve is this low or lower at every look; ``None`` if its end is not."""
    reached = None
    for when, value in zip(seen.times, seen.losses, strict=True):
        if value > loss:
            reached = None
        elif reached is None:
            reached = when
    return reached


def beside(base: Curve, seen: Curve) -> float:
    """How much higher a curve's last three looks are than another curve at the same times."""
    pairs = list(zip(seen.times, seen.losses, strict=True))[-3:]
    return sum(loss - interpolated(base, when) for when, loss in pairs) / len(pairs)


def interpolated(seen: Curve, when: float) -> float:
    """A curve's loss at a time, on a straight line between looks; at its end from there on."""
    looks = list(pairwise(zip(seen.times, seen.losses, strict=True)))
    for (start, before), (end, after) in looks:
        if when <= end:
            return before + (after - before) * (when - start) / (end - start)
    return seen.losses[-1]


Cell = Callable[[str, int], str]


def table(
    title: str, methods: Sequence[Method], stages: Sequence[int], cell: Cell, markdown: bool
) -> Table | str:
    """A row per method, a column per number of stages."""
    heads = ("method", *(f"p = {p}" for p in stages))
    rows = [(one.name, *(cell(one.name, p) for p in stages)) for one in methods]
    if markdown:
        ruler = "|".join(["---", *("--:" for _ in stages)])
        body = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
        return "\n".join([f"\n{title}\n", body[0], f"|{ruler}|", *body[1:]])
    made = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for number, head in enumerate(heads):
        made.add_column(head, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


def tables(
    work: Work, findings: Findings, options: argparse.Namespace, size: Size
) -> Iterable[Table | str]:
    """What was found of one work: losses, accuracies, times."""
    methods = [BY_NAME[name] for name in options.methods]
    curves = {key: curve(found, key[1], size) for key, found in findings.items()}

    def loss(name: str, p: int) -> str:
        one = findings[name, p]
        return f"{one.loss:.3f}±{one.spread:.3f} ({1e3 * one.rate:g})"

    def correct(name: str, p: int) -> str:
        return f"{100 * findings[name, p].correct:.1f}"

    def reached(name: str, p: int) -> str:
        when = time_to(findings[BASELINE, p].loss, curves[name, p])
        return f"{curves[name, p].times[-1]:.1f}, {'–' if when is None else f'{when:.1f}'}"

    def ahead(name: str, p: int) -> str:
        return f"{beside(curves[BASELINE, p], curves[name, p]):+.3f}".replace("-", "−")

    made = partial(table, methods=methods, stages=options.stages, markdown=options.markdown)
    yield made(f"{work.title}: held-out loss ± spread (10³ · learning rate)", cell=loss)
    if work.name == "cnn":
        yield made(f"{work.title}: held-out digits that are right, %", cell=correct)
    if BASELINE in options.methods:
        yield made(f"{work.title}: simulated time of all updates, time to 1F1B's", cell=reached)
        yield made(f"{work.title}: loss less 1F1B's at the same simulated time", cell=ahead)


def longer_table(
    work: Work, findings: Findings, options: argparse.Namespace, size: Size, book: Book
) -> Table | str:
    """Held-out losses after so many updates as ``--longer`` says."""

    def cell(name: str, p: int) -> str:
        return f"{longer(work, findings[name, p], p, options.longer, size, book).last:.3f}"

    methods = [BY_NAME[name] for name in options.methods]
    title = f"{work.title}: held-out loss of one seed after {options.longer} updates"
    return table(title, methods, options.stages, cell, options.markdown)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--stages", type=int, nargs="+", choices=(2, 4, 8), default=[2, 4, 8])
    parser.add_argument("--methods", nargs="+", choices=BY_NAME, default=ROWS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of results and pictures")
    parser.add_argument("--markdown", action="store_true", help="print tables for the docs")
    parser.add_argument("--longer", type=int, help="updates of one more run per method")
    parser.add_argument("--quick", action="store_true", help="a few updates; nothing is kept")
    return parser.parse_args()


def measure(options: argparse.Namespace, size: Size, folder: Path, console: Console) -> None:
    """Train what is missing, then print tables and draw pictures."""
    book = Book(folder)
    for work in (WORKS[name]() for name in options.works):
        findings: Findings = {}
        for p in options.stages:
            for method in (BY_NAME[name] for name in options.methods):
                found = findings[method.name, p] = find(work, method, p, size, book)
                console.log(f"{work.name}, p = {p}, {method.name}: {found.loss:.3f}")
        shown = list(tables(work, findings, options, size))
        if options.longer:
            shown.append(longer_table(work, findings, options, size, book))
        for one in shown:
            print(one) if isinstance(one, str) else console.print(one)
        for p in options.stages if set(ROWS) <= set(options.methods) else ():
            drawn = [curve(found, p, size) for (_, q), found in findings.items() if q == p]
            title = f"{work.title}, {p} stages: mean over {len(size.seeds)} seeds"
            svg = picture(title, drawn, UNITS[work.name], logarithmic=work.name == "cnn")
            (folder / f"{work.name}-p{p}.svg").write_text(svg + "\n", encoding="utf-8")
    book.finish()


def main() -> None:
    """Everything, or a little of everything."""
    options = parsed()
    torch.set_num_threads(1)
    console = Console(width=150)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            size = Size(updates=6, every=2, seeds=(0,), num_rates=1)
            measure(options, size, Path(folder), console)
    else:
        measure(options, Size(), options.folder, console)
    console.print(f"{platform.machine()}, torch {torch.__version__}, {len(METHODS)} methods")


if __name__ == "__main__":
    main()
