"""Hydra beside GPipe and naive model parallelism on our own engine, where no model fits a device.

Each device may use a part of a model's state. A fleet spills every model and keeps both devices
busy; the others put half of a model on each device, one model after another, with recompute. Rows
are many, so that there is more to compute than to move, as with the models that Hydra is for.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch

import penstock as pk
from benchmarks.contest.fleet import NUM_DEVICES, Plans, Spec, fleet_run, pipelined_run

_MODELS, _ROUNDS = 4, 3
_SHARE = 0.8
"""Of weights, gradients and optimizer state: too little for a model, enough for half of one."""


def _options(microbatches: int = 4) -> argparse.Namespace:
    return argparse.Namespace(rows=512, microbatches=microbatches, share=_SHARE, tier="host")


@dataclass
class _SmallDevices:
    """Plans that keep to the memory of a device.

    Attributes:
        plans: of the contest of fleets; with one microbatch, only one of several devices works.
    """

    plans: Plans

    def __post_init__(self) -> None:
        self.pipelined = cache(self._pipelined)

    @property
    def options(self) -> argparse.Namespace:
        return self.plans.options

    def of(self, number: int, spec: Spec) -> pk.Plan:
        return self.plans.spilled(spec.blocks, spec.width)

    def _pipelined(self, spec: Spec) -> pk.Plan:
        graph = self.plans.graph(spec.blocks, spec.width)
        held = sum(2 * layer.parameter_bytes + layer.optimizer_bytes for layer in graph.layers)
        return pk.plan(
            graph, pk.Cluster.local(NUM_DEVICES), microbatches=self.options.microbatches,
            schedule="gpipe", stages=NUM_DEVICES, recompute="stage",
            memory_bytes=round(held * _SHARE),
        )  # fmt: skip


def hydra_here() -> Iterator[tuple[str, str]]:
    """Two figures, medians over rounds in turns."""
    torch.set_num_threads(1)
    plans, whole = Plans(_options()), Plans(_options(microbatches=1))
    wanted = {f"m{number}": Spec(8, 256, 3) for number in range(_MODELS)}
    many, single = _SmallDevices(plans), _SmallDevices(whole)
    ways = {
        "hydra": lambda: fleet_run(wanted, many, "longest", NUM_DEVICES),
        "gpipe": lambda: pipelined_run(wanted, many),
        "naive": lambda: pipelined_run(wanted, single),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, run in ways.items():
            gc.collect()
            seconds[way].append(run().seconds)
    fleet, gpipe, naive = (median(seconds[way]) for way in ways)
    where = f"{_MODELS} models on {NUM_DEVICES} cores"
    yield "Hydra below GPipe", f"{1 - fleet / gpipe:.0%} ({where})".replace("-", "−")
    yield "Hydra over naive model parallelism", f"{naive / fleet:.2f}× ({where})"
