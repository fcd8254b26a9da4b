"""Timing by turns: every contestant meets the same machine, whatever else it does meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch.distributed as dist

from penstock.engine.transport.rendezvous import Rendezvous

_DEADLINE_SECONDS = 60.0


class Measured(NamedTuple):
    """Medians over rounds, of one step.

    Attributes:
        seconds: from when all ranks began until the last had ended.
        cpu_seconds: of all threads of both processes.
    """

    seconds: float
    cpu_seconds: float


class Contest(NamedTuple):
    """What one contestant does in a round.

    Attributes:
        run: all steps of the round on this rank; ``None`` where the rank has nothing to do.
        num_steps: in a round.
    """

    run: Callable[[], object] | None
    num_steps: int


def measure_in_turns(contests: Mapping[str, Contest], rounds: int) -> dict[str, Measured]:
    """Run all contests round by round; call it on every rank, with the same names in order.

    A rank without work waits at a gloo barrier. That sleeps: it took 3 ms of CPU per second.
    """
    walls: dict[str, list[float]] = {name: [] for name in contests}
    cpus: dict[str, list[float]] = {name: [] for name in contests}
    for _ in range(rounds):
        for name, (run, num_steps) in contests.items():
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            if run is not None:
                run()
            # Before the barrier, whose own cost is no part of the work.
            cpus[name].append((time.process_time() - cpu) / num_steps)
            dist.barrier()
            walls[name].append((time.perf_counter() - start) / num_steps)
    meeting = Rendezvous.of_group("measuring in turns", _DEADLINE_SECONDS, "wait longer")
    ranks = meeting.exchange(cpus, dict[str, list[float]], "to tell its processor time")
    return {
        name: Measured(
            statistics.median(walls[name]),
            statistics.median(map(sum, zip(*(cpu[name] for cpu in ranks), strict=True))),
        )
        for name in contests
    }
