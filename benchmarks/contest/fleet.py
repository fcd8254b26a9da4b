"""3, 5 and 12 models on two devices, beside the bound and beside what people do without a fleet.

    python -m benchmarks.contest.fleet [--models 3 5 12] [--width 512 --rows 128 --steps 6]
        [--share 0.5] [--tier host|/scratch] [--rounds 3]

Ways take turns, round by round, on the same models and data; only training counts, not building.
Run it alone: it keeps two cores busy.

fleet    longest first; every model spilled, its stages from the tier (every third one fits instead)
fair     the same, whoever has done the smallest share
whole    a model at a time on each device
naive    a model at a time, on one device after another, so that only one works
1F1B     a model at a time in memory, over both devices, without recompute

Columns: seconds; ÷ the bound max(ΣT/D, max T) of the same round, T being each model's time on one
device while the other one is idle (naive); ÷ the bound with T as the visits took in this run,
which leaves out what two busy cores cost each other; the share of time that devices were idle;
predicted ÷ measured; whether all weights are those of the first way, to the bit.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as pk
from benchmarks.common.alone import publish
from penstock.cli.show import print_table, say
from penstock.planning.turns.visits import PolicyName, bound

NUM_DEVICES = 2
WAYS = ("fleet", "fair", "whole", "naive", "1F1B")
_POLICIES: Mapping[str, PolicyName] = {"fleet": "longest", "fair": "fair"}


class Spec(NamedTuple):
    """A model: blocks, their width, and minibatches to train on."""

    blocks: int
    width: int
    steps: int


def specs(count: int, options: argparse.Namespace) -> dict[str, Spec]:
    """Three equal models; otherwise models of several sizes and lengths."""
    if count <= 3:
        return {f"m{n}": Spec(8, options.width, options.steps) for n in range(count)}
    return {
        f"m{n}": Spec(
            6 + n % 4,
            options.width - options.width // 4 * (n % 3) // 2 // 8 * 8,
            max(1, options.steps - n % 2),
        )
        for n in range(count)
    }


def model_of(spec: Spec) -> nn.Sequential:
    """Blocks of two linear layers each."""
    torch.manual_seed(0)
    width = spec.width
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(spec.blocks)
        )
    )


def data_of(spec: Spec, options: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Two minibatches, in turns."""
    generator = torch.Generator().manual_seed(1)
    size = options.rows, spec.width
    own = [
        (torch.randn(size, generator=generator), torch.randn(size, generator=generator))
        for _ in range(2)
    ]
    return [own[step % 2] for step in range(spec.steps)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """As in the prototype."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass
class Plans:
    """Plans of one kind of model, each made once."""

    options: argparse.Namespace

    def __post_init__(self) -> None:
        self.graph = cache(self._graph)
        self.spilled = cache(self._spilled)

    def _graph(self, blocks: int, width: int) -> pk.LayerGraph:
        rows = self.options.rows // self.options.microbatches
        inputs, targets = torch.randn(rows, width), torch.randn(rows, width)
        model = model_of(Spec(blocks, width, 1))
        return pk.profile(model, inputs, loss=F.mse_loss, targets=targets)

    def _spilled(self, blocks: int, width: int) -> pk.Plan:
        graph, options = self.graph(blocks, width), self.options
        held = sum(2 * layer.parameter_bytes + layer.optimizer_bytes for layer in graph.layers)
        host = options.tier == "host"
        tier = pk.Tier(kind="host") if host else pk.Tier(folder=options.tier)
        return pk.plan(
            graph,
            pk.Cluster.local(1, tiers=[tier]),
            microbatches=options.microbatches,
            memory_bytes=round(held * options.share),
            spill="always",
        )

    def of(self, number: int, spec: Spec) -> pk.Plan:
        """The plan of one job of a fleet."""
        if number % 3 < 2:
            return self.spilled(spec.blocks, spec.width)
        graph = self.graph(spec.blocks, spec.width)
        return pk.plan(graph, pk.Cluster.local(1), microbatches=self.options.microbatches)

    def pipelined(self, spec: Spec) -> pk.Plan:
        """Over both devices, in memory."""
        return pk.plan(
            self.graph(spec.blocks, spec.width),
            pk.Cluster.local(NUM_DEVICES),
            microbatches=self.options.microbatches,
            schedule="1f1b",
            stages=NUM_DEVICES,
            recompute="never",
        )


class FleetPlans(Protocol):
    """Whose plans models train by, one at a time or as jobs of a fleet."""

    @property
    def options(self) -> argparse.Namespace:
        """With ``rows``."""

    def of(self, number: int, spec: Spec) -> pk.Plan:
        """The plan of one job of a fleet."""

    def pipelined(self, spec: Spec) -> pk.Plan:
        """Over both devices."""


class Measured(NamedTuple):
    """What came out of one way."""

    seconds: float
    own_bound: float | None
    idle: float | None
    predicted: float | None
    job_seconds: Mapping[str, float]
    digest: str


def fleet_run(
    wanted: Mapping[str, Spec], plans: FleetPlans, policy: PolicyName, num_devices: int
) -> Measured:
    """All models as jobs of one fleet."""
    jobs = {
        name: pk.Job(
            lambda spec=spec: model_of(spec),
            plans.of(number, spec),
            data_of(spec, plans.options),
            loss=F.mse_loss,
            optimizer=adamw,
            steps=spec.steps,
            seed=0,
        )
        for number, (name, spec) in enumerate(wanted.items())
    }
    with pk.Fleet(jobs, num_devices, policy=policy) as fleet:
        results = fleet.run()
        failed = [result.error for result in results.values() if result.error is not None]
        if failed:
            raise failed[0]
        timeline = results.timeline
        states = {name: pipeline.state_dict() for name, pipeline in fleet.pipelines.items()}
        return Measured(
            timeline.makespan,
            timeline.bound_seconds,
            timeline.idle,
            fleet.simulate().makespan,
            dict(timeline.job_seconds),
            digest(states),
        )


def pipelined_run(wanted: Mapping[str, Spec], plans: FleetPlans) -> Measured:
    """One model after another, over both devices."""
    seconds, states = 0.0, {}
    planned = {spec: plans.pipelined(spec) for spec in {*wanted.values()}}
    for name, spec in wanted.items():
        model, data = model_of(spec), data_of(spec, plans.options)
        with pk.Pipeline(
            model, planned[spec], loss=F.mse_loss, optimizer=adamw, seed=0
        ) as pipeline:
            begin = time.perf_counter()
            for _ in pipeline.steps(data):
                pass
            seconds += time.perf_counter() - begin
            states[name] = pipeline.state_dict()
    predicted = sum(planned[spec].step_seconds * spec.steps for spec in wanted.values())
    return Measured(seconds, None, None, predicted, {}, digest(states))


def digest(states: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Of all weights."""
    summed = hashlib.sha256()
    for _, state in sorted(states.items()):
        for _, value in sorted(state.items()):
            summed.update(value.detach().numpy().tobytes())
    return summed.hexdigest()


def runs(wanted: Mapping[str, Spec], plans: Plans) -> dict[str, Callable[[], Measured]]:
    """By way, what runs it."""
    ways: dict[str, Callable[[], Measured]] = {
        way: lambda policy=policy: fleet_run(wanted, plans, policy, NUM_DEVICES)
        for way, policy in _POLICIES.items()
    }
    ways["whole"] = lambda: fleet_run(wanted, plans, "whole", NUM_DEVICES)
    ways["naive"] = lambda: fleet_run(wanted, plans, "whole", 1)
    ways["1F1B"] = lambda: pipelined_run(wanted, plans)
    return ways


def contest(count: int, options: argparse.Namespace, plans: Plans) -> list[tuple[str, ...]]:
    """Rows of the table, for so many models."""
    wanted = specs(count, options)
    ways = runs(wanted, plans)
    measured: dict[str, list[Measured]] = {way: [] for way in ways}
    for round_ in range(options.rounds):
        for way, run in ways.items():
            gc.collect()
            measured[way].append(run())
            say(f"{count} models, round {round_}, {way}: {measured[way][-1].seconds:.2f} s")
    first = measured["fleet"][0].digest
    rows = []
    for way, rounds in measured.items():
        alone = [
            bound([*naive.job_seconds.values()], NUM_DEVICES).seconds for naive in measured["naive"]
        ]
        over = [one.seconds / least for one, least in zip(rounds, alone, strict=True)]
        rows.append(
            (
                str(count),
                way,
                f"{statistics.median(one.seconds for one in rounds):.2f}",
                f"{statistics.median(over):.3f}",
                _median([one.own_bound and one.seconds / one.own_bound for one in rounds]),
                _median([one.idle for one in rounds]),
                _median([one.predicted and one.predicted / one.seconds for one in rounds]),
                "yes" if all(one.digest == first for one in rounds) else "no",
            )
        )
    return rows


def _median(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.3f}" if known else "–"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, nargs="+", default=[3, 5, 12])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--tier", default="host")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plans = Plans(options)
    rows = [row for count in options.models for row in contest(count, options, plans)]
    columns = (
        "models", "way", "seconds", "÷ bound alone", "÷ bound as run", "idle", "predicted",
        "same bits",
    )  # fmt: skip
    print_table(columns, rows, num_texts=2)


if __name__ == "__main__":
    publish(main)
