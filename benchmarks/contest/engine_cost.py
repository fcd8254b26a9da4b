"""What the engine costs per microbatch: tiny layers, in threads, many microbatches.

    python benchmarks/contest/engine_cost.py [--against ../before/src] [--rounds 40]

Each checkout has a process of its own, which stays alive. They take turns, so that other work on
the machine meets both alike; the one that is not asked waits for a line and costs nothing. Medians
over rounds, of wall time and of all threads' processor time, which hardly depends on other work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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
    from penstock.model.spine import spine_fingerprint, spine_of
    from penstock.plans import Plan, StagePlan

    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    layers = spine_of(model)
    names = [layer.name for layer in layers]
    each = len(names) // num_ranks
    plan = Plan(
        model=spine_fingerprint(layers),
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        num_threads=1,
        stages=tuple(
            StagePlan(layers=tuple(names[rank * each : (rank + 1) * each]), rank=rank)
            for rank in range(num_ranks)
        ),
    )
    return pk.Pipeline(
        model,
        plan,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        **(options or {}),
    )


def serve() -> None:
    """Perform a round whenever a line with the name of a case comes in."""
    import torch

    batch = torch.ones(NUM_MICROBATCHES, 4), torch.zeros(NUM_MICROBATCHES, 4)
    pipelines = {name: pipeline_of(**case) for name, case in CASES.items()}
    for line in sys.stdin:
        processor, wall = time.process_time(), time.perf_counter()
        for _ in pipelines[line.strip()].steps([batch] * NUM_STEPS):
            pass
        seconds = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps([1e6 * part / NUM_STEPS / NUM_MICROBATCHES for part in seconds]))
        sys.stdout.flush()


def server(source: Path | None) -> Callable[[str], Turn]:
    """A process with the ``src`` folder of a checkout, or with what this one imports."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if source is not None:
        environment["PYTHONPATH"] = str(source.resolve())
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def ask(case: str) -> Turn:
        print(case, file=requests, flush=True)
        return Turn(*json.loads(answers.readline()))

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="the src folder of another checkout")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    servers = {"here": server(None)}
    if arguments.against is not None:
        servers["there"] = server(arguments.against)
    for case in CASES:
        turns: dict[str, list[Turn]] = {name: [] for name in servers}
        for number in range(arguments.rounds + 2):
            order = [*servers] if number % 2 else [*reversed(servers)]
            for name in order:
                turn = servers[name](case)
                if number >= 2:  # before, programs are compiled and memory is found
                    turns[name].append(turn)
        shown = [
            f"{name} {statistics.median(t.wall for t in found):.1f} µs, "
            f"processor {statistics.median(t.processor for t in found):.1f} µs"
            for name, found in turns.items()
        ]
        if len(turns) == 2:
            here, there = turns.values()
            wall, processor = (
                statistics.median(
                    own[at] / other[at] for own, other in zip(here, there, strict=True)
                )
                for at in range(2)
            )
            shown.append(f"here / there, median of pairs: {wall:.3f}, processor {processor:.3f}")
        print(f"{case}: {'; '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
