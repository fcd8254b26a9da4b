"""Optimizer steps, counted on meta."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.base.errors import InputError
from penstock.core.pricing import Kernel, KernelPace, seconds_of_each
from penstock.engine.model.optimizer_factory import OptimizerFactory
from penstock.engine.model.spine import NamedLayer
from penstock.training.estimating.counting import KernelCounter, OnMeta
from penstock.training.profiler.alone.overheads import (
    NamedParameters,
    Update,
    assumed_update,
    optimizer_of_copies,
    trained_parameters,
)
from penstock.training.profiler.alone.passes import num_bytes


def count_updates(
    layers: Sequence[NamedLayer], optimizer: OptimizerFactory | None, pace: KernelPace
) -> list[Update]:
    """The optimizer's step of every layer, without values.

    Raises:
        InputError: no layer has parameters of which the optimizer can be made.
    """
    trained = [trained_parameters(layer) for layer in layers]
    if optimizer is None:
        return [assumed_update(own) for own in trained]
    refusals: list[InputError] = []
    updates = [_counted(own, optimizer, refusals, pace) for own in trained]
    if refusals and len(refusals) == sum(map(bool, trained)):
        raise refusals[0]
    return updates


def _counted(
    named: NamedParameters,
    optimizer: OptimizerFactory,
    refusals: list[InputError],
    pace: KernelPace,
) -> Update:
    fused: list[bool] = []

    def prepare(built: torch.optim.Optimizer) -> None:
        # No fused optimizer takes what is on meta.
        fused.append(any(group.get("fused") for group in built.param_groups))
        for group in built.param_groups:
            if group.get("fused"):
                group["fused"] = None

    with OnMeta(converts=False):
        built = optimizer_of_copies(named, optimizer, refusals, prepare)
    if built is None:
        return Update(0.0, 0)
    state_bytes, held = built.state_bytes, built.gradient_bytes
    built.give_gradients()
    with KernelCounter(converts=False) as counter:
        built.optimizer.step()
    kernels = counter.kernels
    if fused[0]:
        # Weights, gradients and state are read once; weights and state are written.
        moved = 2 * num_bytes([weight for _, weight in named]) + held + 2 * state_bytes
        kernels = [Kernel("pointwise", "step", "fp32", 0.0, {0: moved}, {})]
    return Update(_seconds(kernels, len(named), pace), state_bytes, held)


def _seconds(kernels: Sequence[Kernel], num_parameters: int, pace: KernelPace) -> float:
    seconds = sum(seconds_of_each(kernels, pace))
    if pace.is_host:
        return seconds
    # On an accelerator, torch's optimizers take all parameters in one call.
    launch = pace.device.efficiency.launch_seconds.value
    return seconds - launch * len(kernels) * (1 - 1 / max(num_parameters, 1))
