"""What recording every op costs: the interpreter's loop beside the same loop without a clock.

    python -m benchmarks.contest.recording [--op-ms 0.2]

Both perform the same matrix products, in turns, one thread; medians over rounds. The first line is
the cost of a record where the op itself does nothing; then the share that it is of short ops,
measured directly; then what it takes to make a timeline of the records, when somebody asks for it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common.alone import publish
from penstock.core.schedule import Kind, Op
from penstock.engine.run.outcome import RankRecord, timeline
from penstock.engine.run.rank.interpreter import Journal, perform_all

NUM_OPS = 20
"""In a row; few, so that other work on the machine meets both alike."""


@dataclass(frozen=True)
class Step:
    """An op of the benchmark; ``work`` is what it does."""

    op: Op

    def perform(self, work: Callable[[], object]) -> None:
        """Do it."""
        work()


def nothing() -> None:
    """Take no time."""


def products(op_seconds: float) -> Callable[[], object]:
    """Multiplies two matrices, as often as fills the wanted time."""
    matrix, result = torch.ones(96, 96), torch.empty(96, 96)
    once = min(seconds_of(lambda: torch.mm(matrix, matrix, out=result)) for _ in range(2000))
    times = max(1, round(op_seconds / once))

    def multiply() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=result)

    return multiply


def unrecorded(steps: Sequence[Step], work: Callable[[], object]) -> None:
    """The interpreter's loop without a clock."""
    for step in steps:
        try:
            step.perform(work)
        except Exception as error:
            raise RuntimeError(str(step.op)) from error


def seconds_of(work: Callable[[], object]) -> float:
    """How long ``work`` takes once."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(work: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds per op without and with records, and the median of their differences."""
    ops = [Op(0, Kind.FORWARD, k) for k in range(NUM_OPS)]
    steps = [Step(op) for op in ops]
    without, recorded = [], []
    for number in range(rounds):
        pair = [
            (without, lambda: unrecorded(steps, work)),
            (recorded, lambda: perform_all(steps, work, Journal(ops))),
        ]
        # Whoever comes second finds warmer caches: take turns in that too.
        for times, run in pair if number % 2 else reversed(pair):
            times.append(seconds_of(run) / NUM_OPS)
    differences = [b - a for a, b in zip(without, recorded, strict=True)]
    return tuple(map(statistics.median, (without, recorded, differences)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op-ms", type=float, default=0.2, help="length of an op")
    op_seconds = parser.parse_args().op_ms / 1e3
    torch.set_num_threads(1)
    _, _, record = in_turns(nothing, 5000)
    print(f"a record: {record * 1e9:.0f} ns, {record / op_seconds:.2%} of {op_seconds * 1e3:g} ms")
    without, recorded, difference = in_turns(products(op_seconds), 1000)
    print(
        f"ops without records {without * 1e6:.2f} µs, with {recorded * 1e6:.2f} µs; "
        f"difference, median of pairs: {difference / without:+.2%}"
    )
    ops, starts = [Op(0, Kind.FORWARD, k) for k in range(1000)], array("d", range(1000))
    record_of_rank = RankRecord(ops, starts, starts)
    making = min(seconds_of(lambda: timeline([[record_of_rank]], "")) for _ in range(50)) / 1000
    print(f"a timeline of them: {making * 1e9:.0f} ns per op, {making / op_seconds:.2%}")


if __name__ == "__main__":
    publish(main)
