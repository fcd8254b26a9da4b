"""Ways to spread a stage over processes: seconds of a step as planned, beside those that it takes.

    python -m benchmarks.predicting.spread [--ways hybrid experts] [--rounds 3] [--steps 5]

Each way is planned from a profile of its model on one process, and from what `penstock
measure-cluster` says of as many processes of this machine; then these train, rounds of all ways in
turns. Weights are sharded, kept for a step or freed behind each use; positions between tensor ranks
("sequence"); experts of a mixture; positions of a sequence between context ranks. Two processes
compute as they are; where there are four, on two cores, a layer computes its true values, and then
waits as long as it would take alone on a core of its own (``shaped_training``).

The goal is a difference of at most 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.network.shaped_training import SlowLinear
from examples.mixture_of_experts import Mixture
from penstock.demo import gpt

MOST_WRONG = 0.10
_WARM_UP = 2
_MICROBATCHES = 4
Batch = tuple[Tensor, Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all."""
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=False)


def small_gpt() -> nn.Module:
    """11 M parameters, 64 tokens."""
    torch.manual_seed(0)
    return gpt.GPT(vocabulary=512, width=384, heads=6, layers=6, context=64)


def captured_gpt() -> nn.Module:
    """The same, recorded, for 256 tokens."""
    torch.manual_seed(0)
    model = gpt.GPT(vocabulary=512, width=256, heads=4, layers=4, context=256)
    return pk.capture(model, tokens(256)[0][:1], granularity="block", verify=False)


def mixtures() -> nn.Module:
    """Mixtures of eight experts, two for each token."""
    torch.manual_seed(0)
    width = 256
    layers = (part for _ in range(4) for part in (nn.Linear(width, width), Mixture(width, 8)))
    return nn.Sequential(*layers, nn.Linear(width, 16))


def slow_layers() -> nn.Module:
    """Layers that take 10 ms per row and pass, whatever the core does."""
    torch.manual_seed(0)
    return nn.Sequential(*(SlowLinear(768, 1e-3) for _ in range(8)))


def tokens(length: int) -> Batch:
    """Two rows of each microbatch."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 512, (2, 2 * _MICROBATCHES, length), generator=generator)
    return drawn[0], drawn[1]


def numbers(rows: int, width: int, outputs: int) -> Batch:
    """So many rows of each microbatch."""
    generator, count = torch.Generator().manual_seed(1), rows * _MICROBATCHES
    inputs = torch.randn(count, width, generator=generator)
    return inputs, torch.randn(count, outputs, generator=generator)


class Way(NamedTuple):
    """One way to spread.

    Attributes:
        model: builds it, alike in every process.
        batch: makes a minibatch.
        loss: of a microbatch.
        processes: that share a stage.
        asked: of ``pk.plan``, besides one stage.
        levels: which copies have weights together, where not all do.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Any], Tensor]
    processes: int
    asked: Mapping[str, Any]
    levels: tuple[int, ...] = ()

    def plan(self, cluster: pk.Cluster) -> pk.Plan:
        """From a profile of a microbatch on this process alone."""
        inputs, targets = (own[: len(own) // _MICROBATCHES] for own in self.batch())
        graph = pk.profile(
            self.model(), inputs, targets=targets, loss=self.loss, optimizer=adamw,
            ranks=0 if self.processes > 2 else 2,
        )  # fmt: skip
        plan = pk.plan(
            graph, cluster, microbatches=_MICROBATCHES, stages=1, schedule="1f1b",
            recompute="never", **self.asked,
        )  # fmt: skip
        if not self.levels:
            return plan
        return plan.edited(summing=replace(plan.summing, levels=(self.levels,)))


def sharded(copies: int, kept: str) -> dict[str, Any]:
    """What is asked for of shards."""
    return {"replicas": (copies,), "reducer": "fully-sharded", "gathered_for": kept}


def rows_of_mixtures() -> Batch:
    return numbers(64, 256, 16)


def rows_of_slow_layers() -> Batch:
    return numbers(8, 768, 768)


WAYS: dict[str, Way] = {
    "sharded-step": Way(small_gpt, lambda: tokens(64), gpt.loss, 2, sharded(2, "step")),
    "sharded-use": Way(small_gpt, lambda: tokens(64), gpt.loss, 2, sharded(2, "use")),
    "sequence": Way(small_gpt, lambda: tokens(64), gpt.loss, 2, {"tensor_ranks": 2}),
    "experts": Way(
        mixtures, rows_of_mixtures, mse_loss, 2, {"replicas": (2,), "expert_ranks": 2}
    ),
    "context": Way(captured_gpt, lambda: tokens(256), gpt.loss, 2, {"context_ranks": 2}),
    "sharded-4": Way(slow_layers, rows_of_slow_layers, mse_loss, 4, sharded(4, "use")),
    "hybrid": Way(
        slow_layers, rows_of_slow_layers, mse_loss, 4, sharded(4, "use"), levels=(0, 0, 1, 1)
    ),
}


def train(way: Way, plan: pk.Plan, steps: int) -> list[float]:
    """One process's part: seconds of each step, from when all begin until the last has ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch, seconds = way.batch(), []
    with pk.Pipeline(
        way.model(), plan, loss=way.loss, optimizer=adamw, results="none", record=False,
        deadline_seconds=120,
    ) as pipeline:  # fmt: skip
        for _ in range(_WARM_UP + steps):
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(*batch)
            dist.barrier()
            seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return seconds[_WARM_UP:]


def in_processes(folder: Path, name: str, steps: int) -> list[float]:
    """What a way takes in processes of its own."""
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={WAYS[name].processes}", "-m", "benchmarks.predicting.spread"),
            *("--job", str(folder), "--ways", name, "--steps", str(steps)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    seconds: list[float] = json.loads((folder / f"{name}.seconds.json").read_text())
    return seconds


def measured_cluster(folder: Path, processes: int) -> pk.Cluster:
    """So many processes of this machine, and how fast they are joined."""
    path = folder / f"cluster-{processes}.json"
    if not path.exists():
        words = ["measure-cluster", "--ranks", str(processes), "-o", str(path)]
        command = [sys.executable, "-m", "penstock.cli", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return pk.Cluster.load(path)


def show(plans: Mapping[str, pk.Plan], measured: Mapping[str, list[float]]) -> None:
    """A line for each way."""
    table = Table("", "processes", "measured ms", "best ms", "predicted ms", "difference")
    wrong = []
    for name, plan in plans.items():
        usual = statistics.median(measured[name])
        wrong.append(abs(plan.step_seconds / usual - 1))
        table.add_row(
            name, str(WAYS[name].processes), f"{usual * 1e3:.1f}",
            f"{min(measured[name]) * 1e3:.1f}", f"{plan.step_seconds * 1e3:.1f}",
            f"{plan.step_seconds / usual - 1:+.1%}",
        )  # fmt: skip
    Console(width=110).print(table)
    within = sum(own <= MOST_WRONG for own in wrong)
    print(f"{within} of {len(wrong)} within {MOST_WRONG:.0%}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.job is not None:
        (name,) = options.ways
        seconds = train(WAYS[name], pk.Plan.load(options.job / f"{name}.json"), options.steps)
        if os.environ["RANK"] == "0":
            (options.job / f"{name}.seconds.json").write_text(json.dumps(seconds))
        return
    torch.set_num_threads(1)
    plans: dict[str, pk.Plan] = {}
    measured: dict[str, list[float]] = {name: [] for name in options.ways}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name in options.ways:
            way = WAYS[name]
            plans[name] = way.plan(measured_cluster(folder, way.processes))
            plans[name].save(folder / f"{name}.json")
        for _ in range(options.rounds):
            for name in options.ways:
                measured[name] += in_processes(folder, name, options.steps)
    show(plans, measured)


if __name__ == "__main__":
    publish(main)
