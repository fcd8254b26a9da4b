"""The cutter that fits a plan: what it copies to the devices of which ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.engine.device.queue import DeviceQueue
from penstock.engine.run.cutter import Cutter
from penstock.engine.run.giving import DeviceGiver, Giver
from penstock.engine.run.layout import Layout
from penstock.engine.run.recipe import Recipe
from penstock.planning.plans import Plan


def cutter_of(
    plan: Plan,
    layout: Layout,
    recipe: Recipe,
    devices: Mapping[int, torch.device],
    queues: Mapping[int, DeviceQueue],
) -> Cutter:
    """What cuts minibatches for the ranks of this process, and copies what they are given.

    Args:
        devices: of the seats of this process, by their numbers.
        queues: their work, if any of them is an accelerator.
    """
    last = len(plan.stages) - 1
    here = [
        {
            devices[seat]
            for rank in plan.placement.ranks_of(stage)
            for seat in layout.seats_of(rank)
            if seat in devices
        }
        for stage in (0, last)
    ]
    return Cutter(
        layout.num_microbatches,
        layout.num_slices,
        recipe.weighting,
        layout.has_copies and recipe.updates == "minibatch",
        gives_inputs=_giver(here[0], queues, "stage 0, given its inputs"),
        gives_targets=_giver(here[1], queues, f"stage {last}, given its targets"),
    )


def _giver(
    devices: set[torch.device], queues: Mapping[int, DeviceQueue], told: str
) -> Giver | None:
    if not devices:
        return None  # other processes compute with them
    # Which copy of a stage gets a microbatch is known when it is there; then its rank fetches it.
    if not queues or len(devices) > 1:
        return Giver()
    (device,) = devices
    return DeviceGiver(device, told)
