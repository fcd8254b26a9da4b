"""Where the jobs of a fleet compute: on cores, of which each takes any job, or on accelerators.

A job on an accelerator stays there: what its microbatches keep between forward and backward lies in
that device's memory, and its optimizer's tensors are made there. Which one it gets is settled when
the fleet is made, the longest minibatches first, each to the device that has least to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.base.errors import InputError
from penstock.base.values import whole
from penstock.core.timing.fleet_timeline import MOST_FLEET_DEVICES
from penstock.engine.device.accelerators import HOST, accelerators, devices_of_ranks, is_on_host
from penstock.training.fleet.job import Job

FleetDevices = int | Sequence[str | int | torch.device]
"""How many devices, or which ones; one that is named twice computes two jobs at once."""


def seats_of(devices: FleetDevices, jobs: Mapping[str, Job]) -> list[torch.device]:
    """The device behind each number.

    Args:
        devices: as ``Fleet`` takes them: of a number of devices, what they are follows the plans.

    Raises:
        InputError: there are no such devices, or some are cores and others are not.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        return _planned(whole("devices", devices, 1, MOST_FLEET_DEVICES), jobs)
    count = whole("the number of devices", len(devices), 1, MOST_FLEET_DEVICES)
    chosen = devices_of_ranks([*devices], (False,) * count, range(count))
    if len({is_on_host(device) for device in chosen.values()}) > 1:
        raise InputError(
            "devices: some are cores and others accelerators, and a job that begins on one could "
            "not go on with the other; make a fleet of each"
        )
    return [chosen[number] for number in range(count)]


def _planned(count: int, jobs: Mapping[str, Job]) -> list[torch.device]:
    on_accelerators = [name for name, job in jobs.items() if any(job.plan.on_accelerator)]
    on_cores = [name for name in jobs if name not in on_accelerators]
    if not on_accelerators:
        return [HOST] * count
    if on_cores:
        raise InputError(
            f"job {on_accelerators[0]} is planned for an accelerator and job {on_cores[0]} for "
            "cores; plan all for the same, or name the devices, as in devices=[0]"
        )
    here = accelerators()
    if len(here) < count:
        have = f"{len(here)} ({here[0].type})" if here else "none that torch knows of"
        raise InputError(
            f"jobs are planned for accelerators, and of {count} this machine has {have}; give "
            "fewer devices, or devices=['cpu', 'cpu'] to train on cores all the same"
        )
    return [*here[:count]]


def homes_of(jobs: Mapping[str, Job], seats: Sequence[torch.device]) -> dict[str, int | None]:
    """The number of the device on which each job computes; ``None`` where any may take it."""
    if all(map(is_on_host, seats)):
        return dict.fromkeys(jobs)
    seconds = {name: sum(visit.seconds for visit in job.visits) for name, job in jobs.items()}
    loads = [(0.0, 0, number) for number in range(len(seats))]
    homes: dict[str, int | None] = {}
    for name in sorted(jobs, key=lambda name: -seconds[name]):
        load, count, number = min(loads)  # without a profile, the one with the fewest jobs
        loads[number] = load + seconds[name], count + 1, number
        homes[name] = number
    return homes
