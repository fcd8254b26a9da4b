"""Ways to spread a stage over processes: seconds of a step as planned, beside those that it takes.

    python -m benchmarks.predicting.spread [--ways hybrid experts] [--rounds 3] [--steps 5]

Each way is planned from a profile of its model on one process, and from what `penstock
measure-cluster` says of as many processes; then these train, rounds of all ways in turns. Weights
are sharded, kept for a step or freed behind each use, over all processes or inside hosts only
("hybrid"); positions between tensor ranks ("sequence"); experts of a mixture; positions of a
sequence between context ranks.

Two processes compute on a core each. Four are two each on two hosts (``shaped_network``), and share
this machine's two cores, which real ones do not: a layer computes its true values, and then waits
until as much time has passed as an accelerator of a given speed would take (``shaped_training``).

The goal is a difference of at most 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.network.shaped_network import ShapedNetwork, end_on_signals, missing
from benchmarks.network.shaped_training import SlowLinear, expect_success
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
    return nn.Sequential(*(SlowLinear(384, 1e-3) for _ in range(8)))


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
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Any], Tensor]
    processes: int
    asked: Mapping[str, Any]

    def plan(self, cluster: pk.Cluster) -> pk.Plan:
        """From a profile of a microbatch on this process alone."""
        inputs, targets = (own[: len(own) // _MICROBATCHES] for own in self.batch())
        graph = pk.profile(
            self.model(), inputs, targets=targets, loss=self.loss, optimizer=adamw,
            ranks=0 if self.processes > 2 else 2,
        )  # fmt: skip
        return pk.plan(
            graph, cluster, microbatches=_MICROBATCHES, stages=1, schedule="1f1b",
            recompute="never", **self.asked,
        )  # fmt: skip


def sharded(copies: int, kept: str, *, hybrid: bool = False) -> dict[str, Any]:
    """What is asked for of shards."""
    return {
        "replicas": (copies,), "reducer": "fully-sharded", "gathered_for": kept, "hybrid": hybrid
    }  # fmt: skip


def rows_of_mixtures() -> Batch:
    return numbers(64, 256, 16)


def rows_of_slow_layers() -> Batch:
    return numbers(8, 384, 384)


WAYS: dict[str, Way] = {
    "sharded-step": Way(small_gpt, lambda: tokens(64), gpt.loss, 2, sharded(2, "step")),
    "sharded-use": Way(small_gpt, lambda: tokens(64), gpt.loss, 2, sharded(2, "use")),
    "sequence": Way(small_gpt, lambda: tokens(64), gpt.loss, 2, {"tensor_ranks": 2}),
    "experts": Way(mixtures, rows_of_mixtures, mse_loss, 2, {"replicas": (2,), "expert_ranks": 2}),
    "context": Way(captured_gpt, lambda: tokens(256), gpt.loss, 2, {"context_ranks": 2}),
    "sharded-4": Way(slow_layers, rows_of_slow_layers, mse_loss, 4, sharded(4, "use")),
    "hybrid": Way(slow_layers, rows_of_slow_layers, mse_loss, 4, sharded(4, "use", hybrid=True)),
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


class Processes:
    """As many processes as a way has: two of this machine, or four on two hosts.

    Args:
        folder: for what they tell.
        network: of the hosts, where there are some.
    """

    def __init__(self, folder: Path, network: ShapedNetwork | None = None) -> None:
        self._folder, self._network = folder, network

    def cluster(self) -> pk.Cluster:
        """The processes, and how fast they are joined."""
        path = self._folder / f"{'processes' if self._network is None else 'hosts'}.json"
        words = [sys.executable, "-m", "penstock.cli", "measure-cluster", "-o", str(path)]
        if self._network is None:
            subprocess.run([*words, "--ranks", "2"], check=True, stdout=subprocess.DEVNULL)
        else:
            quiet = ["sh", "-c", f"exec {shlex.join(words)} > /dev/null"]
            expect_success(self._network.run(quiet, per_host=2))
        return pk.Cluster.load(path)

    def seconds(self, name: str, steps: int) -> list[float]:
        """What a way takes."""
        words = ["-m", "benchmarks.predicting.spread", "--job", str(self._folder)]
        words += ["--ways", name, "--steps", str(steps)]
        if self._network is None:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            subprocess.run(
                [*launch, "--nproc-per-node=2", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
            )  # fmt: skip
        else:
            one_thread = {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, *words]
            expect_success(self._network.run(command, environment=one_thread, per_host=2))
        taken: list[float] = json.loads((self._folder / f"{name}.seconds.json").read_text())
        return taken


def beside_predictions(
    processes: Processes, folder: Path, ways: Sequence[str], options: argparse.Namespace
) -> list[Row]:
    """What some ways take on the same processes, in turns."""
    if not ways:
        return []
    cluster = processes.cluster()
    plans = {name: WAYS[name].plan(cluster) for name in ways}
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")
    for _ in range(options.rounds):
        for name in ways:
            measured[name] += processes.seconds(name, options.steps)
    return [Row(name, plan.step_seconds, measured[name]) for name, plan in plans.items()]


class Row(NamedTuple):
    """A way, its predicted seconds and those that were measured."""

    name: str
    predicted: float
    measured: list[float]

    @property
    def difference(self) -> float:
        """Of the prediction, as a share of what is usual."""
        return self.predicted / statistics.median(self.measured) - 1


def show(rows: Sequence[Row]) -> None:
    """A line for each way."""
    table = Table("", "processes", "measured ms", "best ms", "predicted ms", "difference")
    for row in rows:
        table.add_row(
            row.name, str(WAYS[row.name].processes), f"{statistics.median(row.measured) * 1e3:.1f}",
            f"{min(row.measured) * 1e3:.1f}", f"{row.predicted * 1e3:.1f}",
            f"{row.difference:+.1%}",
        )  # fmt: skip
    Console(width=110).print(table)
    within = sum(abs(row.difference) <= MOST_WRONG for row in rows)
    print(f"{within} of {len(rows)} within {MOST_WRONG:.0%}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link of each host")
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
    end_on_signals()
    here = [name for name in options.ways if WAYS[name].processes == 2]
    on_hosts = [name for name in options.ways if WAYS[name].processes == 4]
    if on_hosts and (reason := missing()) is not None:
        print(f"left out {' and '.join(on_hosts)}: {reason}")
        on_hosts = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        rows = beside_predictions(Processes(folder), folder, here, options)
        if on_hosts:
            with ShapedNetwork(2, options.mbit) as network:
                hosts = Processes(folder, network)
                rows += beside_predictions(hosts, folder, on_hosts, options)
    show(rows)


if __name__ == "__main__":
    publish(main)
