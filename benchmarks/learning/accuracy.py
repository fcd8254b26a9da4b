"""Time to accuracy: epochs and seconds until a model knows so much, with PipeDream, 2BW, GPipe and
data parallelism.

    python -m benchmarks.learning.accuracy [--works gpt cnn] [--seeds 0 1 2] [--quick]

The two small tasks of ``convergence``, text and digits, are trained through the real engine with
four stages, or four copies, at the learning rate that ``convergence`` found best for the method.
Every run is as long as the others; the target is reached at the first of two looks on end that are
as low. The digits are scikit-learn's, which is no dependency of Penstock.

updates   until the target, mean over seeds ± half of their range; – if a seed never is there
epochs    the same as shares of the data
foreseen  updates times what one takes with F = I = W, hops and sums that are free, in updates of
          one device
seconds   updates times the wall clock of one on this machine, whose cores four ranks share
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch
from torch import nn

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.learning.methods import BY_NAME, Method, equal_layers, plan_of
from benchmarks.learning.runs import LayOut, Run, Setting, train
from benchmarks.learning.works import WORKS, Work

NUM_STAGES, EVERY = 4, 20
TARGETS = {"gpt": 2.8, "cnn": 0.5}
"""Held-out losses: nats per byte, and per digit, of which about 85 % are right then."""

COLUMNS = ("task", "method", "updates", "epochs", "foreseen", "seconds")


def _flushed(method: Method, num_stages: int, updates: int, model: nn.Module) -> pk.Plan:
    """GPipe: one stage on each rank, as many microbatches."""
    return pk.plan(
        equal_layers(num_stages, model), pk.Cluster.local(num_stages), microbatches=num_stages,
        stages=num_stages, schedule="gpipe", recompute="never",
    )  # fmt: skip


def _copied(method: Method, num_stages: int, updates: int, model: nn.Module) -> pk.Plan:
    """A copy of the model on every rank, which has a microbatch."""
    return pk.plan(
        equal_layers(num_stages, model), pk.Cluster.local(num_stages), microbatches=num_stages,
        replicas=(num_stages,), schedule="1f1b",
    )  # fmt: skip


class Trained(NamedTuple):
    """A row's way to train.

    Attributes:
        name: for people.
        method: of ``convergence``, which has its policy and optimizer.
        rates: the learning rate that was best there with four stages, by task.
        lay_out: makes its plan.
    """

    name: str
    method: str
    rates: Mapping[str, float]
    lay_out: LayOut = plan_of


WAYS = (
    Trained("PipeDream", "stash", {"gpt": 1e-3, "cnn": 8e-3}),
    Trained("2BW", "2BW", {"gpt": 2e-3, "cnn": 2e-3}),
    Trained("GPipe", "1F1B", {"gpt": 4e-3, "cnn": 4e-3}, _flushed),
    Trained("data parallel", "1F1B", {"gpt": 4e-3, "cnn": 4e-3}, _copied),
)
UPDATES = {"gpt": 400, "cnn": 300}


def reached(run: Run, target: float) -> int | None:
    """The update at which a held-out loss is this low, and so it is at the next look."""
    for look, (loss, after) in enumerate(pairwise(run.held_out)):
        if max(loss, after) <= target:
            return look * run.setting.every
    return None


def trained(work: Work, way: Trained, seed: int, updates: int, every: int) -> Run:
    """One run."""
    setting = Setting(work.name, way.method, NUM_STAGES, way.rates[work.name], seed, updates, every)
    return train(work, setting, way.lay_out)


def row(work: Work, way: Trained, runs: list[Run]) -> list[str]:
    """Of the table."""
    counts = [reached(run, TARGETS[work.name]) for run in runs]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return [work.title, way.name, "–", "–", "–", "–"]
    model = work.build(0)
    plan = way.lay_out(BY_NAME[way.method], NUM_STAGES, runs[0].setting.updates, model)
    share = plan.step_seconds / plan.one_device_seconds
    paces = [run.seconds / run.setting.updates for run in runs]
    seconds = [count * pace for count, pace in zip(known, paces, strict=True)]
    digits_of_an_update = len(str(work.epoch_updates))
    return [
        work.title,
        way.name,
        _with_spread(known, 0),
        _with_spread([count / work.epoch_updates for count in known], digits_of_an_update),
        _with_spread([count * share for count in known], 1),
        _with_spread(seconds, 1),
    ]


def _with_spread(values: list[float] | list[int], digits: int) -> str:
    return f"{fmean(values):.{digits}f} ± {(max(values) - min(values)) / 2:.{digits}f}"


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """All tasks and ways; seeds take turns among the ways."""
    for work in (WORKS[name]() for name in options.works):
        updates, every = UPDATES[work.name], EVERY
        if options.quick:
            updates, every = 6, 2
        runs: dict[str, list[Run]] = {way.name: [] for way in WAYS}
        for seed in options.seeds:
            for way in WAYS:
                runs[way.name].append(trained(work, way, seed, updates, every))
        for way in WAYS:
            yield row(work, way, runs[way.name])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="a few updates; to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'--:|' * (len(COLUMNS) - 2)}")
    for cells in rows(options):
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    publish(main)
