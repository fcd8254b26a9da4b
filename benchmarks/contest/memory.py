"""How much memory a schedule takes, counted and as the operating system sees it.

    python -m benchmarks.contest.memory [--microbatches 4 16] [--only "Penstock 1F1B"]

Two processes of one thread each train the demonstration GPT, whose activations are then most of
what they hold. Microbatches stay the same size while their number grows, so GPipe needs more memory
for more of them and 1F1B does not. Every contestant runs in processes of its own, since resident
memory never shrinks again. Columns, for ranks 0 and 1:

counted       the most that autograd kept at once (``engine.device.activation_meter``), in MiB
microbatches  the same, divided by what one microbatch alone leaves
resident      the most that was in memory at once during the steps, in MiB, less what was in memory
              before them: activations, gradients, optimizer, messages and the allocator's slack

Beside it: what counting costs, over one process that trains without.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from benchmarks.common.alone import publish
from benchmarks.common.system import status_bytes
from benchmarks.common.works import Work, gpt_work, tiny_work
from benchmarks.contest.peers import one_process, two_ranks
from benchmarks.contest.penstock_peers import penstock_peer
from benchmarks.contest.runtime import print_table
from benchmarks.contest.torch_peers import PEERS
from penstock.engine.device.activation_meter import ActivationMeter
from penstock.engine.device.memory import keep_freed_pages
from penstock.engine.transport.rendezvous import Rendezvous

CONTESTANTS = {
    "Penstock GPipe": penstock_peer("gpipe", "process-group"),
    "Penstock 1F1B": penstock_peer("1f1b", "process-group"),
    **PEERS,
}
ROWS = 2
DEADLINE_SECONDS = 60.0
MIB = 2**20


def resident_from_here() -> int:
    """Bytes in memory now, without what was freed; the peak begins anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def bytes_of_one_microbatch(work: Work, rank: int) -> int:
    """What autograd keeps of one microbatch in this rank's half of the model."""
    layers = work.layers()
    first, last = nn.Sequential(*layers[: work.cut]), nn.Sequential(*layers[work.cut :])
    # A view would count as the whole minibatch.
    inputs = work.inputs.chunk(work.num_microbatches)[0].clone()
    targets = work.targets.chunk(work.num_microbatches)[0].clone()
    meter = ActivationMeter([*first.parameters(), *last.parameters()])
    if rank == 0:
        with meter.watching(0):
            edge = get_gradient_edge(first(inputs))
    else:
        hidden = first(inputs).detach().requires_grad_()
        with meter.watching(0):
            edge = get_gradient_edge(work.loss(last(hidden), targets))
    num_bytes = meter.live_bytes
    del edge
    return num_bytes


def measure(work: Work, name: str, rank: int) -> dict[str, int]:
    """One rank's numbers, in bytes, over the first two steps of a contestant."""
    peer = CONTESTANTS[name](work)
    meter = ActivationMeter([*peer.part.parameters(), *peer.part.buffers()])
    resident = resident_from_here()
    for _ in range(2):
        with meter.watching(0):
            peer.step(work.inputs, work.targets)
    counted, resident = meter.peak_bytes, status_bytes("VmHWM") - resident
    peer.close()
    one = bytes_of_one_microbatch(work, rank)
    return {"counted": counted, "resident": resident, "one": one}


def on_one_rank(name: str, num_microbatches: int) -> None:
    """What each process of a contestant does; rank 0 prints everybody's numbers."""
    with two_ranks() as rank:
        numbers = measure(gpt_work(num_microbatches, ROWS), name, rank)
        meeting = Rendezvous.of_group("counting memory", DEADLINE_SECONDS, "wait longer")
        both = meeting.exchange(numbers, dict[str, int], "to tell its numbers")
        if rank == 0:
            print("NUMBERS " + json.dumps(both), flush=True)


def in_processes_of_its_own(name: str, num_microbatches: int) -> list[dict[str, int]]:
    """Both ranks' numbers of a contestant."""
    arguments = ["--contestant", name, "--microbatches", str(num_microbatches)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ran = subprocess.run(
        [*torchrun, "--nproc-per-node=2", "-m", "benchmarks.contest.memory", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = [line for line in ran.stdout.splitlines() if line.startswith("NUMBERS ")]
    numbers: list[dict[str, int]] = json.loads(found[0].removeprefix("NUMBERS "))
    return numbers


def cost_of_counting(work: Work, rounds: int, steps_per_round: int) -> float:
    """Seconds of a step with the meter, over those without: median of alternating rounds."""
    peer = one_process(work)
    meter = ActivationMeter(peer.part.parameters())
    ratios = []
    for turn in range(-1, rounds):
        seconds = []
        for watch in (False, True):
            start = time.perf_counter()
            for _ in range(steps_per_round):
                if watch:
                    with meter.watching(0):
                        peer.step(work.inputs, work.targets)
                else:
                    peer.step(work.inputs, work.targets)
            seconds.append(time.perf_counter() - start)
        if turn >= 0:
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def row(name: str, num_microbatches: int, ranks: list[dict[str, int]]) -> tuple[str, ...]:
    """One contestant's line of the table."""

    def both(cells: list[str]) -> str:
        return " / ".join(cells)

    return (
        name,
        str(num_microbatches),
        both([f"{one['counted'] / MIB:.1f}" for one in ranks]),
        both([f"{one['counted'] / one['one']:.2f}" for one in ranks]),
        both([f"{one['resident'] / MIB:.0f}" for one in ranks]),
    )


def main() -> None:
    """Measure everybody with 4 and 16 microbatches, then what measuring costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        on_one_rank(options.contestant, options.microbatches[0])
        return
    table = [
        row(name, count, in_processes_of_its_own(name, count))
        for name in options.only
        for count in options.microbatches
    ]
    print_table(("runtime", "m", "counted MiB", "microbatches", "resident MiB"), table)
    torch.set_num_threads(1)
    keep_freed_pages()
    for work, steps_per_round in ((gpt_work(4), 2), (tiny_work(4), 40)):
        ratio = cost_of_counting(work, rounds=7, steps_per_round=steps_per_round)
        print(f"counting costs {ratio:.3f} of a step of {work.name}")
    print(f"{platform.machine()}, torch {torch.__version__}")


if __name__ == "__main__":
    publish(main)
