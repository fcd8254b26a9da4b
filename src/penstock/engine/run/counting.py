"""Counting what a rank keeps: bytes of activations, and microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.device.activation_meter import ActivationMeter, KeptMemory, Saved
from penstock.engine.device.memory import gauge_of
from penstock.engine.stage.protocol import RunnableStage
from penstock.planning.plans import Plan


class Peak(NamedTuple):
    """The most that a rank held at once during one minibatch.

    Attributes:
        activation_bytes: what stages kept for backwards, by unique storages.
        microbatches: how many had anything kept by a stage; one that two stages of the rank keep
            counts as two, and a slice as its share.
    """

    activation_bytes: int
    microbatches: float


class Counter:
    """Counts one rank's stages while they work."""

    def __init__(self, stages: Mapping[int, RunnableStage]) -> None:
        self._stages = stages
        modules = [module for stage in stages.values() for module in stage.layer_modules]
        self._meter = ActivationMeter(
            tensor for module in modules for tensor in (*module.parameters(), *module.buffers())
        )
        self._kept: dict[tuple[int, int], KeptMemory] = {}

    def begin(self) -> None:
        """A new minibatch."""
        self._meter.reset_peak()

    def watching(
        self,
        stage: int,
        unit: int,
        instead: Callable[[Tensor], Any] | None = None,
        around: Callable[[Saved], Any] | None = None,
    ) -> AbstractContextManager[None]:
        """What autograd saves meanwhile belongs to a stage's microbatch, or slice of it; except
        what ``instead`` takes the place of, and as long as what it is wrapped in holds it."""
        return self._meter.watching((stage, unit), instead, around)

    def keep(self, key: tuple[int, int], tensors: Iterable[Tensor]) -> KeptMemory:
        """Count memory for a stage and a unit as long as what this gives is held."""
        return self._meter.keep(key, tensors)

    def after(self, stage: int, unit: int) -> None:
        """Count anew what a stage holds of a microbatch, or slice, outside of autograd."""
        key = (stage, unit)
        held = self._stages[stage].held(unit)
        self._kept.pop(key, None)
        if held:
            self._kept[key] = self._meter.keep(key, held)

    def forget(self) -> None:
        """The minibatch has ended, well or not."""
        self._kept.clear()

    def peak(self, num_slices: int) -> Peak:
        """Since the minibatch began; ``num_slices``: of a microbatch."""
        return Peak(self._meter.peak_bytes, self._meter.peak_keys / num_slices)


def memory_of_ranks(
    plan: Plan, activations: Sequence[float], devices: Mapping[int, torch.device]
) -> tuple[int, ...]:
    """The memory that every rank has needed at most.

    Args:
        activations: bytes that every rank has held for backwards.
        devices: of the ranks of this process, by their numbers; an accelerator tells itself how
            much was taken there.
    """
    held = list(plan.rank_bytes)
    if plan.spill is None:
        stages_of = plan.prediction.placement.stages_of
        held = [
            sum(plan.stages[stage].state_bytes for stage in stages) + ceil(kept)
            for stages, kept in zip(stages_of, activations, strict=True)
        ]
    for rank, device in devices.items():
        gauge = gauge_of(device)
        if gauge is not None:
            held[rank] = gauge.peak()
    return tuple(held)
