"""Is it faster without a flush? Emulated devices first, then two real cores.

    python -m benchmarks.learning.asynchronous [-p 4 8] [--update-ms 0 1] [--steps 4]
        [--quick]
    torchrun --nproc-per-node=2 -m benchmarks.learning.asynchronous
        [--works gpt7] [--microbatches 4] [--rounds 7] [--minibatches 12] [--quick]

Emulated: every rank is a real process with real messages; F, I and W are waits of ``--op-ms``.
Flushed 1F1B with few microbatches m, whose efficiency is m/(m+p−1), beside the streams of
PipeDream and PipeDream-2BW. "per microbatch" is a flushed step ÷ m, or what a microbatch takes in
the middle of a stream; the prediction is the simulator's with the hop measured in the same run.
Efficiency 1 is p times one device; updates are no compute.

Real: the same model, cut, optimizer and minibatches for all contestants, in turns within one run.
Flushed contestants are first proven to compute what one process does; streams are not what one
process computes (their proof is the sequential replay in ``tests/numerics``). PipeDream makes an
update per microbatch unless it says something else, all others one per minibatch. A round is
``--minibatches`` minibatches, which are one stream, warm-up and draining included.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.common.alone import publish
from benchmarks.common.turns import Contest, Measured, measure_in_turns
from benchmarks.common.works import WORKS, Work
from benchmarks.contest.peers import Watch, one_process, prove_same, reference, two_ranks
from benchmarks.contest.penstock_peers import penstock_peer
from benchmarks.contest.runtime import ALONE, TRANSPORTS, Contestant, print_table
from benchmarks.contest.torch_peers import torch_pipeline
from penstock import Costs, rehearse, schedules
from penstock.core.versions import USUAL, Stash

LEAST_EFFICIENCY, MOST_APART, LEAST_RATIO = 0.95, 0.05, 1.15
TORCH = "torch 1F1B"
_STREAM_PER_RANK = 12


class Row(NamedTuple):
    """One rehearsal.

    Attributes:
        name: of the schedule.
        num_ranks, num_microbatches: p, and microbatches per minibatch.
        update_seconds: of an update.
        predicted, measured: seconds per microbatch.
        compute_seconds: of one rank per microbatch.
        load: of the machine, a minute's average.
    """

    name: str
    num_ranks: int
    num_microbatches: int | None
    update_seconds: float
    predicted: float
    measured: float
    compute_seconds: float
    load: float

    @property
    def apart(self) -> float:
        """By how much longer it took than predicted."""
        return self.measured / self.predicted - 1

    @property
    def efficiency(self) -> float:
        """Measured: 1 is p times one device."""
        return self.compute_seconds / self.measured

    @property
    def verdict(self) -> str:
        """Whether a stream is as fast as it should be."""
        if self.name not in USUAL:
            return ""
        met = self.efficiency >= LEAST_EFFICIENCY and abs(self.apart) <= MOST_APART
        return "met" if met else "**missed**"

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        return (
            self.name,
            str(self.num_ranks),
            "any" if self.num_microbatches is None else str(self.num_microbatches),
            f"{self.update_seconds * 1e3:g}",
            f"{self.predicted * 1e3:.2f}",
            f"{self.measured * 1e3:.2f}",
            f"{self.apart:+.1%}",
            f"{self.compute_seconds / self.predicted:.1%}",
            f"{self.efficiency:.1%}",
            self.verdict,
            f"{self.load:.1f}",
        )


EMULATED_HEADER = (
    "schedule", "p", "m", "update ms", "predicted ms per microbatch", "measured", "difference",
    "efficiency predicted", "measured", "≥ 95 %, within 5 %", "load",
)  # fmt: skip


def flushed(num_ranks: int, count: int, costs: Costs, steps: int) -> Row:
    """1F1B with a flush per ``count`` microbatches."""
    schedule = schedules.build("1f1b", num_ranks=num_ranks, num_microbatches=count)
    _, predicted, measured = rehearse(schedule, costs, steps=steps).comparisons[0]
    return _row("1f1b", num_ranks, count, costs, predicted / count, measured / count)


def streaming(name: str, num_ranks: int, count: int | None, costs: Costs, steps: int) -> Row:
    """A schedule that never flushes; ``count`` microbatches per update if it is not each."""
    length = _STREAM_PER_RANK * num_ranks
    schedule = schedules.build(name, num_ranks=num_ranks, num_microbatches=length)
    found = rehearse(schedule, costs, steps=steps, minibatch=count).steady_seconds
    assert found is not None
    return _row(name, num_ranks, count, costs, found.predicted, found.measured)


def _row(
    name: str, ranks: int, count: int | None, costs: Costs, predicted: float, measured: float
) -> Row:
    numbers = (costs.forward, costs.backward_input, costs.backward_weight, costs.update)
    *compute, update = (float(number) for number in numbers)  # type: ignore[arg-type]
    return Row(name, ranks, count, update, predicted, measured, sum(compute), os.getloadavg()[0])


def emulated(options: argparse.Namespace) -> Iterator[Row]:
    """All rehearsals."""
    op = options.op_ms / 1e3
    for update_ms in options.update_ms:
        costs = Costs(op, op, op, update=update_ms / 1e3)
        for ranks in options.ranks:
            counts = [ranks] if options.quick else [ranks // 2, ranks, 2 * ranks]
            yield from (flushed(ranks, count, costs, options.steps) for count in counts)
            yield streaming("pipedream", ranks, None, costs, options.steps)
            for count in counts:
                if count >= ranks - 1:  # fewer would need a third version
                    yield streaming("pipedream-2bw", ranks, count, costs, options.steps)


def rehearse_all(options: argparse.Namespace) -> None:
    """Print the table of emulated devices."""
    started, found = time.perf_counter(), []
    for row in emulated(options):
        found.append(row)
        print(" ", *row.cells(), flush=True)
    print()
    print_table(EMULATED_HEADER, [row.cells() for row in found])
    streams = [row for row in found if row.verdict]
    print(
        f"\n{os.cpu_count()} cores, {platform.machine()}, F = I = W = {options.op_ms:g} ms, "
        f"medians of {options.steps - 1} steps, "
        f"{(time.perf_counter() - started) / 60:.1f} minutes; "
        f"{sum(row.verdict == 'met' for row in streams)} of {len(streams)} streams as wanted"
    )


def all_contestants() -> dict[str, Contestant]:
    """By name, in the order of the table; flushed and not, one after the other."""
    found = {ALONE: Contestant(one_process, on_one_rank=True)}
    for kind, transport in TRANSPORTS.items():
        for name, family, ahead, policy in (
            ("1F1B", "1f1b", False, None),
            ("pipedream", "pipedream", True, None),
            ("pipedream-2bw", "pipedream-2bw", True, None),
            ("1F1B (steps)", "1f1b", True, None),
            ("pipedream, update per minibatch", "pipedream", True, Stash(updates="minibatch")),
        ):
            build = penstock_peer(family, transport, ahead=ahead, versions=policy)
            found[f"Penstock {kind} {name}"] = Contestant(
                build, transport == "threads", family, ahead
            )
    return found | {TORCH: Contestant(torch_pipeline("1f1b"), family="1f1b")}


def enter(
    work: Work, contestants: Mapping[str, Contestant], rank: int, count: int, ends: ExitStack
) -> dict[str, Contest]:
    """Build everybody, prove those that flush, let the others run once, and say what a round is."""
    expected, batch, found = reference(work), (work.inputs, work.targets), {}
    for name, contestant in contestants.items():
        if contestant.on_one_rank and rank:
            found[name] = Contest(None, count)
            continue
        watch, flushes = Watch(), contestant.family not in USUAL
        peer = contestant.build(watch.over(work) if flushes else work)
        ends.callback(peer.close)
        if flushes:
            prove_same(work, expected, peer, watch)
        peer.train([batch] * 3)
        found[name] = Contest(partial(peer.train, [batch] * count), count)
    return found


REAL_HEADER = (
    "work", "m", "runtime", "ms per minibatch", "CPU ms", "over one process", "over torch 1F1B",
    "over our 1F1B",
)  # fmt: skip


def rows(work: Work, measured: Mapping[str, Measured]) -> list[tuple[str, ...]]:
    """Of one work."""
    table = []
    for name, (seconds, cpu_seconds) in measured.items():
        kind = " ".join(name.split()[:2])
        others = (ALONE, TORCH, f"{kind} 1F1B")
        ratios = [measured[one].seconds / seconds if one in measured else None for one in others]
        table.append(
            (
                work.name,
                str(work.num_microbatches),
                name,
                f"{seconds * 1e3:.1f}",
                f"{cpu_seconds * 1e3:.1f}",
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            )
        )
    return table


def compete(options: argparse.Namespace) -> None:
    """Print the table of two real cores."""
    started, table = time.perf_counter(), []
    goals: list[tuple[str, str, str]] = []
    loads = [os.getloadavg()[0]]
    with two_ranks() as rank:
        for name in options.works:
            for count in options.microbatches:
                work = WORKS[name](count)
                with ExitStack() as ends:
                    contests = enter(work, all_contestants(), rank, options.minibatches, ends)
                    measured = measure_in_turns(contests, options.rounds)
                table += rows(work, measured)
                goals += _goals(work, measured)
                loads.append(os.getloadavg()[0])
        if rank == 0:
            print(
                f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, "
                f"medians of {options.rounds} rounds of {options.minibatches} minibatches, load "
                f"{', '.join(f'{load:.1f}' for load in loads)}, "
                f"{(time.perf_counter() - started) / 60:.1f} minutes\n"
            )
            print_table(REAL_HEADER, table)
            print()
            print_table(("goal", "measured", ""), goals)


def _goals(work: Work, measured: Mapping[str, Measured]) -> Iterator[tuple[str, str, str]]:
    for name, contestant in all_contestants().items():
        if contestant.family in USUAL:
            ratio = measured[TORCH].seconds / measured[name].seconds
            title = f"{work.name}, m = {work.num_microbatches}, {name}: {LEAST_RATIO} × {TORCH}"
            yield title, f"{ratio:.2f}", "met" if ratio >= LEAST_RATIO else "**missed**"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-p", "--ranks", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--op-ms", type=float, default=10.0)
    parser.add_argument("--update-ms", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["gpt7"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minibatches", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.update_ms, options.steps = [4], [1.0], 2
        options.rounds, options.minibatches = 2, 4
    return options


def main() -> None:
    """Emulated devices; under torchrun, real cores."""
    options = parse()
    (compete if "WORLD_SIZE" in os.environ else rehearse_all)(options)


if __name__ == "__main__":
    publish(main)
