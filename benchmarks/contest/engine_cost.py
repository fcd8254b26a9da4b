"""What the engine costs per microbatch: tiny layers, in threads and processes, many microbatches.

    python benchmarks/contest/engine_cost.py [--against ../before/src] [--rounds 40]

Each checkout has processes of its own, which stay alive. They take turns, so that other work on
the machine meets both alike; those that are not asked wait for a line and cost nothing. Medians
over rounds, of wall time and of all threads' and ranks' processor time, which hardly depends on
other work.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NUM_MICROBATCHES = 32
NUM_STEPS = 8
"""In a round."""

CASES: Mapping[str, Mapping[str, Any]] = {
    "one rank": {"schedule": "gpipe", "num_ranks": 1},
    "1F1B": {"schedule": "1f1b"},
    "ZB-H1": {"schedule": "zb-h1"},
    "1F1B, memory counted": {"schedule": "1f1b", "options": {"count_memory": True}},
    "PipeDream": {"schedule": "pipedream"},
    "1F1B, processes": {"schedule": "1f1b"},
    "ZB-H1, processes": {"schedule": "zb-h1"},
}


class Turn(NamedTuple):
    """Microseconds per microbatch in one round."""

    wall: float
    processor: float


def pipeline_of(schedule: str, num_ranks: int = 2, options: Mapping[str, Any] | None = None) -> Any:
    """A pipeline whose layers take next to no time."""
    import torch
    from torch import nn

    import penstock as pk

    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    return pk.Pipeline(
        model,
        plan_of(model, schedule, num_ranks, NUM_MICROBATCHES),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        **(options or {}),
    )


def plan_of(model: Any, schedule: str, num_ranks: int, num_microbatches: int) -> Any:
    """A plan of one stage per rank, of as many layers each."""
    from penstock.engine.model.spine import spine_fingerprint, spine_of
    from penstock.planning.plans import Plan, StagePlan

    layers = spine_of(model)
    names = [layer.name for layer in layers]
    each = len(names) // num_ranks
    return Plan(
        model=spine_fingerprint(layers),
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_threads=1,
        stages=tuple(
            StagePlan(layers=tuple(names[rank * each : (rank + 1) * each]), rank=rank)
            for rank in range(num_ranks)
        ),
    )


def serve(cases: Sequence[str]) -> None:
    """Perform a round whenever a line with the name of a case comes in."""
    import torch

    batch = torch.ones(NUM_MICROBATCHES, 4), torch.zeros(NUM_MICROBATCHES, 4)
    pipelines = {name: pipeline_of(**CASES[name]) for name in cases}
    for line in sys.stdin:
        processor, wall = time.process_time(), time.perf_counter()
        for _ in pipelines[line.strip()].steps([batch] * NUM_STEPS):
            pass
        seconds = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps([1e6 * part / NUM_STEPS / NUM_MICROBATCHES for part in seconds]))
        sys.stdout.flush()


class Server:
    """Processes with the ``src`` folder of a checkout, or with what this one imports.

    Args:
        source: the folder.
        cases: what they are asked for.
        num_ranks: how many processes; several meet as under torchrun.
    """

    def __init__(self, source: Path | None, cases: Sequence[str], num_ranks: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if source is not None:
            environment["PYTHONPATH"] = str(source.resolve())
        if num_ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            environment |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve", *cases],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment | _rank_of(rank, num_ranks),
            )
            for rank in range(num_ranks)
        ]

    def ask(self, case: str) -> Turn:
        """One round."""
        for process in self._processes:
            print(case, file=process.stdin, flush=True)
        turns = [Turn(*json.loads(process.stdout.readline())) for process in self._processes]
        return Turn(max(turn.wall for turn in turns), sum(turn.processor for turn in turns))


def _rank_of(rank: int, num_ranks: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def servers_of(
    sources: Mapping[str, Path | None], cases: Sequence[str]
) -> Iterator[tuple[str, dict[str, Server]]]:
    """Every case, with who performs it in each checkout."""
    for num_ranks in (1, 2):
        own = [case for case in cases if case.endswith("processes") == (num_ranks == 2)]
        if own:
            servers = {name: Server(source, own, num_ranks) for name, source in sources.items()}
            yield from ((case, servers) for case in own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="the src folder of another checkout")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES], metavar="CASE")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    sources = {"here": None}
    if arguments.against is not None:
        sources["there"] = arguments.against
    for case, servers in servers_of(sources, arguments.cases):
        turns: dict[str, list[Turn]] = {name: [] for name in servers}
        for number in range(arguments.rounds + 2):
            order = [*servers] if number % 2 else [*reversed(servers)]
            for name in order:
                turn = servers[name].ask(case)
                if number >= 2:  # before, programs are compiled and memory is found
                    turns[name].append(turn)
        shown = [
            f"{name} {statistics.median(turn.wall for turn in own):.1f} µs, "
            f"processor {statistics.median(turn.processor for turn in own):.1f} µs"
            for name, own in turns.items()
        ]
        if len(turns) == 2:
            pairs = [*zip(*turns.values(), strict=True)]
            wall = statistics.median(here.wall / there.wall for here, there in pairs)
            processor = statistics.median(here.processor / there.processor for here, there in pairs)
            shown.append(f"here / there, median of pairs: {wall:.3f}, processor {processor:.3f}")
        print(f"{case}: {'; '.join(shown)}", flush=True)


if __name__ == "__main__":
    if "--serve" in sys.argv:  # this file alone, beside the source of any checkout
        main()
    else:
        from benchmarks.common.alone import publish

        publish(main)
