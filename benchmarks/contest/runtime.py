"""Penstock's runtime beside torch's: same model, same cuts, same two cores.

    torchrun --nproc-per-node=2 -m benchmarks.contest.runtime
        [--works gpt20 gpt12 gpt7 tiny] [--microbatches 4 8 16] [--rounds 5] [--only 1F1B DDP]

Two ranks of one thread each: two threads of rank 0, while rank 1 sleeps, or two processes. All
contestants take turns within one run; figures are medians over rounds. Each one is first proven to
give the losses, gradients and updated weights of one process: to the bit where it sums in the same
order and m is a power of two. Columns:

speed-up     over one process with one thread on the same microbatches
efficiency   speed-up ÷ the most that the bubble allows: 2m/(m+1) with one stage per rank, else what
             the simulator gives for that schedule with F = I = W; 2 for DDP. For ``steps``, whose
             steps overlap, there is no such bound
wall µs      (measured − one process ÷ the most) ÷ m: what a microbatch costs beyond plain work
CPU µs       likewise, CPU time of both ranks together less that of one process, ÷ m
÷ hand-written
             speed beside that of a loop that does nothing but the same schedule, between threads or
             processes alike (``handwritten``)

"both at once" is one process on each rank, and what that costs: its time beyond one process alone
is neither runtime's doing, but two busy cores slowing each other down. "(steps)" are consecutive
steps given to ``Pipeline.steps``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.common.alone import publish
from benchmarks.common.goals import goals
from benchmarks.common.turns import Contest, Measured, measure_in_turns
from benchmarks.common.works import WORKS, Work
from benchmarks.contest.handwritten import handwritten_processes, handwritten_threads
from benchmarks.contest.peers import Peer, Watch, one_process, prove_same, reference, two_ranks
from benchmarks.contest.penstock_peers import penstock_peer, schedule_for
from benchmarks.contest.torch_peers import data_parallel, torch_pipeline
from penstock import simulate
from penstock.engine.run.drive.joining import TransportName
from penstock.engine.stage.backends import Backend

ALONE = "one process"
BOTH = "one process on each rank, both at once"
FAMILIES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "interleaved 1F1B": "interleaved-1f1b",
    "interleaved ZB": "interleaved-zb",
    "ZB-V": "zb-v",
}
AHEAD = ("1F1B", "ZB-V")
BY_HAND = ("1F1B", "interleaved 1F1B")
COMPILED = ("1F1B", "interleaved 1F1B", "ZB-V")
COMPILERS: tuple[Backend, ...] = ("inductor", "aot_eager")
TRANSPORTS: dict[str, TransportName] = {"threads": "threads", "processes": "shared-memory"}
HAND_WRITTEN = {"threads": handwritten_threads, "processes": handwritten_processes}
SECONDS_PER_ROUND = 0.25
"""About how long each contestant runs in a round."""

FEWEST_STEPS_AHEAD = 3


class Contestant(NamedTuple):
    """One row of the table.

    Attributes:
        build: makes it, on the ranks that it needs.
        on_one_rank: it needs rank 0 only.
        family: of its schedule, if it has one.
        ahead: its steps overlap.
        yardstick: the name of the hand-written one with the same schedule, between threads or
            processes alike; empty if there is none.
    """

    build: Callable[[Work], Peer]
    on_one_rank: bool = False
    family: str = ""
    ahead: bool = False
    yardstick: str = ""

    def most(self, num_microbatches: int) -> float | None:
        """The most that its speed-up over one process can be; ``None`` if nothing bounds it."""
        if self.ahead:
            return None
        if not self.family:
            return 1.0 if self.build is one_process else 2.0
        makespan = simulate(schedule_for(self.family, num_microbatches)).makespan
        return 3 * num_microbatches * stages_of(self.family) / makespan


def stages_of(family: str) -> int:
    """How many stages a family has on two ranks."""
    return schedule_for(family, 4).num_stages


def all_contestants() -> dict[str, Contestant]:
    """By name, in the order of the table."""
    contestants = {ALONE: Contestant(one_process, on_one_rank=True), BOTH: Contestant(one_process)}
    for kind, by_hand in HAND_WRITTEN.items():
        for name in BY_HAND:
            build = by_hand(FAMILIES[name])
            full = yardstick(kind, name)
            contestants[full] = Contestant(build, kind == "threads", FAMILIES[name], yardstick=full)
    for kind, transport in TRANSPORTS.items():
        threads = kind == "threads"
        for name, family in FAMILIES.items():
            build = penstock_peer(family, transport)
            contestants[f"Penstock {kind} {name}"] = Contestant(
                build, threads, family, yardstick=yardstick(kind, name)
            )
        for name, compile in product(COMPILED, COMPILERS):
            build = penstock_peer(FAMILIES[name], transport, compile=compile)
            contestants[f"Penstock {kind} {name} ({compile})"] = Contestant(
                build, threads, FAMILIES[name], yardstick=yardstick(kind, name)
            )
        for name in AHEAD:
            build = penstock_peer(FAMILIES[name], transport, ahead=True)
            contestants[f"Penstock {kind} {name} (steps)"] = Contestant(
                build, threads, FAMILIES[name], ahead=True, yardstick=yardstick(kind, name)
            )
    for name, family in FAMILIES.items():
        build = torch_pipeline(family)
        contestants[f"torch {name}"] = Contestant(
            build, family=family, yardstick=yardstick("processes", name)
        )
    contestants["torch DDP, whole model on both"] = Contestant(data_parallel)
    return contestants


def yardstick(kind: str, name: str) -> str:
    """What the hand-written contestant with a schedule is called; empty if there is none."""
    return f"hand-written {kind} {name}" if name in BY_HAND else ""


def enter(
    work: Work, contestants: Mapping[str, Contestant], rank: int, ends: ExitStack
) -> dict[str, Contest]:
    """Build everybody, prove them equal to one process, and say what each does in a round."""
    expected = reference(work)
    num_steps = steps_per_round(work)
    batch = (work.inputs, work.targets)
    found = {}
    for name, contestant in contestants.items():
        count = max(num_steps, FEWEST_STEPS_AHEAD) if contestant.ahead else num_steps
        if contestant.on_one_rank and rank:
            found[name] = Contest(None, count)
            continue
        watch = Watch()
        peer = contestant.build(watch.over(work))
        ends.callback(peer.close)
        exact = prove_same(work, expected, peer, watch)
        if rank == 0 and not exact:
            print(f"{name}, m = {work.num_microbatches}: equal within rounding", flush=True)
        found[name] = Contest(partial(peer.train, [batch] * count), count)
    return found


def steps_per_round(work: Work) -> int:
    """How many steps a contestant does in a round: rank 0's answer, on both."""
    single, seconds = one_process(work), []
    for _ in range(3):
        start = time.perf_counter()
        single.step(work.inputs, work.targets)
        seconds.append(time.perf_counter() - start)
    # Two ranks take about half as long as one.
    numbers = [max(1, round(2 * SECONDS_PER_ROUND / min(seconds)))]
    dist.broadcast_object_list(numbers)
    return numbers[0]


HEADER = (
    *("work", "m", "runtime", "ms per step", "speed-up", "efficiency", "wall µs", "CPU µs"),
    "÷ hand-written",
)


def rows(
    work: Work, contestants: Mapping[str, Contestant], measured: Mapping[str, Measured]
) -> list[tuple[str, ...]]:
    """The table's rows for one piece of work."""
    count, alone = work.num_microbatches, measured[ALONE]
    table = []
    for name, (seconds, cpu_seconds) in measured.items():
        cells = ["", "", "", ""]
        speedup, most = alone.seconds / seconds, contestants[name].most(count)
        if most is not None and name != ALONE:
            cells[0] = "" if name == BOTH else f"{speedup / most:.2f}"
            cells[1] = f"{(seconds - alone.seconds / most) / count * 1e6:.0f}"
        if name != ALONE:
            own = cpu_seconds / 2 if name == BOTH else cpu_seconds
            cells[2] = f"{(own - alone.cpu_seconds) / count * 1e6:.0f}"
        if by_hand := measured.get(contestants[name].yardstick):
            cells[3] = f"{by_hand.seconds / seconds:.2f}"
        table.append(
            (work.name, str(count), name, f"{seconds * 1e3:.2f}", f"{speedup:.2f}", *cells)
        )
    return table


def print_table(header: Sequence[str], table: Sequence[Sequence[str]]) -> None:
    """As Markdown, ready for docs/benchmarks.md."""
    widths = [max(len(row[i]) for row in [header, *table]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *table]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="runtimes whose names have these")
    return parser.parse_args()


def main() -> None:
    """Prove and time everybody, then say which goals are met."""
    options = parse()
    contestants = {
        name: one
        for name, one in all_contestants().items()
        if name in (ALONE, BOTH) or any(part in name for part in options.only)
    }
    table, results = [], {}
    with two_ranks() as rank:
        for name in options.works:
            for count in options.microbatches:
                work = WORKS[name](count)
                with ExitStack() as ends:
                    contests = enter(work, contestants, rank, ends)
                    measured = measure_in_turns(contests, options.rounds)
                table += rows(work, contestants, measured)
                results[name, count] = measured
        if rank == 0:
            print(f"\nmedians of {options.rounds} rounds\n")
            print_table(HEADER, table)
            print()
            print_table(("goal", "measured", ""), goals(results))


if __name__ == "__main__":
    publish(main)
