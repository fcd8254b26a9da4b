"""``Job``: one model of a fleet, with its data and everything that training it needs; and where it
computes: on cores, of which each takes any job, or on an accelerator.

A job on an accelerator stays there: what its microbatches keep between forward and backward lies in
that device's memory, and its optimizer's tensors are made there. Which one it gets is settled when
the fleet is made, the longest minibatches first, each to the device that has least to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import nn

from penstock.base.errors import InputError
from penstock.base.values import expect, whole
from penstock.core.timing.fleet_timeline import MOST_FLEET_DEVICES
from penstock.engine.device.accelerators import HOST, accelerators, devices_of_ranks, is_on_host
from penstock.engine.model.optimizer_factory import OptimizerFactory
from penstock.engine.model.randomness import RandomStream, stream_seed
from penstock.engine.run.recipe import Loss
from penstock.planning.plans import Plan
from penstock.planning.turns.stop import Stop
from penstock.planning.turns.visits import StageVisit, check_fleet_plan, visits_of
from penstock.training.pipeline import Pipeline

Data = Iterable[tuple[Any, Any]] | Callable[[int], Iterable[tuple[Any, Any]]]

_NOT_FOR_JOBS = frozenset({"devices", "transport", "results", "record", "compare_data"})
_OPTIONS = (
    frozenset(
        name
        for name, parameter in inspect.signature(Pipeline.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    )
    - _NOT_FOR_JOBS
)


class Job:
    """One model of a fleet.

    Args:
        model: as for ``Pipeline``; or a function that makes it, which the fleet calls right before
            the model's stages go to their tier, so that no two models need be in memory at once.
        plan: for one device: with ``spill`` if the model does not fit.
        data: pairs (inputs, targets), which can be iterated over again for each epoch; or a
            function from the number of the epoch to such pairs, which resumes without going through
            earlier epochs again. Random numbers that it draws from torch belong to the job, its
            ``seed`` and the epoch, unless it has a generator of its own.
        loss, optimizer: as for ``Pipeline``.
        steps: minibatches after which the job ends in any case.
        options: further arguments of ``Pipeline``, such as ``clip_norm``, ``metrics`` or ``seed``.

    Raises:
        InputError: the plan has several ranks or never flushes, or an option is unknown.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        plan: Plan,
        data: Data,
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
        steps: int | None = None,
        **options: Any,
    ) -> None:
        expect(plan, Plan, "the plan", "make one with penstock.plan, or Plan.load a file")
        check_fleet_plan(plan)
        if not callable(data):
            expect(data, Iterable, "the data", "give an iterable of (inputs, targets) pairs")
            if isinstance(data, Iterator):
                raise InputError(
                    "the data can be gone through once only; give a list, a DataLoader, or a "
                    "function from the number of the epoch to an iterable"
                )
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            hint = "a fleet decides that itself" if unknown[0] in _NOT_FOR_JOBS else (
                f"take one of {', '.join(sorted(_OPTIONS - {'loss', 'optimizer'}))}"
            )  # fmt: skip
            raise InputError(f"a job has no option {unknown[0]!r}; {hint}")
        self.model, self.plan, self.data = model, plan, data
        self.steps = None if steps is None else whole("steps", steps, 1)
        self.options = {"loss": loss, "optimizer": optimizer, **options}
        seed = options.get("seed")
        self.seed: int = torch.initial_seed() if seed is None else seed

    @cached_property
    def visits(self) -> tuple[StageVisit, ...]:
        """The visits of a minibatch, as the plan predicts them."""
        return visits_of(self.plan)

    def most_steps(self, stop: Stop) -> int | None:
        """After how many minibatches the job ends in any case; ``None`` where its data ends at a
        length that nobody knows."""
        counts = [] if self.steps is None else [self.steps]
        if stop.steps is not None:
            counts.append(stop.steps)
        if stop.epochs is not None:
            try:
                counts.append(stop.epochs * len(self.data))  # type: ignore[arg-type]
            except TypeError:
                return None
        return min(counts, default=None)

    def build(self, device: torch.device | None = None) -> Pipeline:
        """Its pipeline, in a thread of this process.

        Args:
            device: where it computes; by default where the plan says.
        """
        model = self.model
        if not isinstance(model, nn.Module):
            model = model()
        given = {"seed": self.seed, **self.options}
        if device is not None:
            given["devices"] = device
        return Pipeline(model, self.plan, transport="threads", compare_data=False, **given)

    def batches(self, taken: int, num_epochs: int | None) -> Iterator[tuple[Any, Any]]:
        """Minibatches, epoch after epoch.

        Args:
            taken: how many of them, from the beginning, are left out.
            num_epochs: after which they end; ``None``: never.

        Raises:
            InputError: an epoch has none.
        """
        epoch, skipped = 0, 0
        while epoch < (inf if num_epochs is None else num_epochs):
            count = 0
            for batch in self._epoch(epoch):
                count += 1
                if skipped < taken:
                    skipped += 1
                    continue
                yield batch
            if not count:
                raise InputError(
                    f"epoch {epoch} of the data has no minibatch; give data that can be gone "
                    "through again"
                )
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[tuple[Any, Any]]:
        """The minibatches of an epoch. What the loader draws from torch's default generator would
        depend on who draws first, of many jobs; here it has a stream of its own."""
        stream = RandomStream(stream_seed(self.seed, epoch, 0, 0))
        with stream:
            pairs = self.data(epoch) if callable(self.data) else self.data
            remaining = iter(pairs)
        while True:
            with stream:
                try:
                    batch = next(remaining)
                except StopIteration:
                    return
            yield batch


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
