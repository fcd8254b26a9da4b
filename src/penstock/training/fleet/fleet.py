"""``Fleet``: many models at once on fewer devices."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch

from penstock.base.errors import InputError, PenstockError
from penstock.base.values import expect, number, one_of, whole
from penstock.core.timing.fleet_timeline import FleetTimeline
from penstock.engine.run.drive.driver import told
from penstock.engine.weights.buffers import SpareBuffers
from penstock.planning.turns.simulator import TimedJob, bound_of, simulate_fleet
from penstock.planning.turns.stop import Stop, settled
from penstock.planning.turns.visits import POLICIES, Bound, PolicyName, bound, check_name
from penstock.training.fleet.dispatcher import Dispatcher, overdue
from penstock.training.fleet.job import FleetDevices, Job, homes_of, seats_of
from penstock.training.fleet.results import FleetDisplay, FleetResults, JobResult
from penstock.training.fleet.trainee import FleetSaving, Referee, Trainee
from penstock.training.pipeline import Pipeline

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 5.0


class Fleet:
    """Trains many models at once on fewer devices, none idle while a model could use it.

    Every job's minibatches are cut into visits, all that is done to one stage before the next one;
    a device takes one visit after another, of whichever job its policy says, and the next one's
    weights are fetched meanwhile (SHARP of Hydra, arXiv 2110.08633, section 5). Each job has the
    bits of training it alone; one that fails, or whose loss is no number, ends alone. So does one
    that cannot be built: a warning says so at once, and its result why.

    Args:
        jobs: by name, which is also that of the job's folder.
        devices: how many jobs may compute at once; each uses as many threads as its plan says. Jobs
            planned for accelerators have the first so many of them; a list, such as
            ``[0, 1]``, names them. On accelerators each job stays on one.
        policy: ``"longest"`` gives a free device to the job with the longest remaining time, which
            ends within one visit of max(ΣT/D, max T), T being the jobs' times and D the devices;
            ``"fair"`` to the one that has done the smallest share of its work; ``"whole"`` keeps a
            job on its device until its end.
        deadline_seconds: how long a visit may take until its job is given up.

    Raises:
        InputError: no jobs, a name that is no folder's, devices that are not here, or jobs that
            train the same weights.
        Exception: no job can be built; what the first one failed with.
    """

    def __init__(
        self,
        jobs: Mapping[str, Job],
        devices: FleetDevices = 2,
        *,
        policy: PolicyName = "longest",
        deadline_seconds: float = 300.0,
    ) -> None:
        expect(jobs, Mapping, "the jobs", "give a dictionary of pk.Job by name")
        if not jobs:
            raise InputError("a fleet has at least one job; give a dictionary of pk.Job by name")
        for name, job in jobs.items():
            check_name(name)
            expect(job, Job, f"job {name}", "make it with pk.Job")
        seats = seats_of(devices, jobs)
        self._num_devices = len(seats)
        one_of("policy", policy, POLICIES)
        self._policy: PolicyName = policy
        self._deadline_seconds = number("deadline_seconds", deadline_seconds, positive=True)
        self._dispatcher = Dispatcher(self._num_devices, policy)
        self._names = tuple(jobs)
        self._trainees: list[Trainee] = []
        self._unbuilt: dict[str, Exception] = {}
        self._homes = homes_of(jobs, seats)
        self._running = threading.Lock()
        self._is_closed = False
        try:
            for name, job in jobs.items():
                self._build(name, job, seats[self._homes[name] or 0])
            self._tell_unbuilt()
        except BaseException:
            self.close()
            raise
        self._share_memory()

    def _build(self, name: str, job: Job, device: torch.device) -> None:
        try:
            pipeline = _built(name, job, device)
        except Exception as error:
            self._unbuilt[name] = error
            return
        trainee = Trainee(name, job, pipeline, self._dispatcher, self._homes[name])
        self._trainees.append(trainee)
        self._check_apart()

    def _tell_unbuilt(self) -> None:
        """Warn of jobs that cannot be built; if no other is left, raise what failed first."""
        if not self._trainees:
            raise next(iter(self._unbuilt.values()))
        for name, error in self._unbuilt.items():
            text = told(error)
            whose = "" if text.startswith(f"job {name}: ") else f"job {name}: "
            warnings.warn(
                f"{whose}{text} (it cannot be built and counts as failed; the others go on)",
                stacklevel=3,
            )

    def _check_apart(self) -> None:
        """Raise ``InputError`` if the last job trains what another one does."""
        *others, last = self._trainees
        own = _trained_by(last)
        for other in others:
            if not own.isdisjoint(_trained_by(other)):
                raise InputError(
                    f"jobs {other.name} and {last.name} train the same weights, or have the same "
                    "grad_scaler; give each job its own, for example by a function that makes the "
                    "model"
                )

    def _share_memory(self) -> None:
        """Let jobs hand buffers on to each other: no more are free than devices work with."""
        buffers = [own.residence.buffers for own in self._trainees if own.residence is not None]
        most = max((own.budget_bytes for own in buffers), default=0.0)
        devices = {own.device for own in buffers}
        spare = {
            device: SpareBuffers(self._num_devices * most / len(devices)) for device in devices
        }
        for own in buffers:
            own.spare = spare[own.device]

    @property
    def pipelines(self) -> dict[str, Pipeline]:
        """By name, what trains each job: for ``state_dict``, ``evaluate`` and ``save`` between
        runs."""
        return {trainee.name: trainee.pipeline for trainee in self._trainees}

    def run(
        self,
        stop: Stop | None = None,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        every: int = 100,
        show: bool | None = None,
    ) -> FleetResults:
        """Train until all jobs have ended.

        Args:
            stop: how long, for example ``pk.stop.halving("loss", every=100)``.
            steps, epochs: the same in short: minibatches, or passes through the data, of each job.
                They count from a job's beginning, in whatever run that was.
            folder: where jobs save as they go, each in a folder of its own; what is there already
                is gone on from, to the same losses, whatever interrupted it.
            every: minibatches of a job between two of its checkpoints.
            show: a table that follows the run, on standard error; without a terminal there, a line
                for each job that ends. By default only in a terminal.

        Returns:
            What came out of each job, those that failed included.

        Raises:
            InputError: nobody says how long jobs train, or the fleet is closed or runs already.
            FileError: a checkpoint in the folder is of something else.
        """
        jobs = [trainee.job for trainee in self._trainees]
        ends = settled(stop, steps, epochs, [job.steps is not None for job in jobs])
        for trainee in self._trainees:
            _check_metric(trainee, ends)
        saving = None if folder is None else FleetSaving(Path(folder), whole("every", every, 1))
        if self._is_closed or not self._running.acquire(blocking=False):
            state = "is closed" if self._is_closed else "runs already"
            raise InputError(f"this fleet {state}; make another one, or wait")
        try:
            if saving is not None and not any(trainee.step for trainee in self._trainees):
                self.load(saving.folder)
            self._train(ends, saving, show)
            return self._results(ends)
        finally:
            self._running.release()

    def _train(self, stop: Stop, saving: FleetSaving | None, show: bool | None) -> None:
        referee = Referee(stop, [*self._names])
        self._dispatcher.open()
        begun = [trainee for trainee in self._trainees if trainee.begin()]
        for name in set(self._names) - {trainee.name for trainee in begun}:
            referee.gone(name)
        try:
            for trainee in begun:
                threading.Thread(
                    target=trainee.train,
                    args=(stop, referee, len(self._names), saving),
                    name=f"penstock job {trainee.name}",
                    daemon=True,
                ).start()
            with FleetDisplay(self._trainees, self._dispatcher, show) as table:
                self._watch(begun, referee, table)
        except BaseException:
            self._end(referee, "the fleet was interrupted")
            raise
        self._dispatcher.rest()

    def _watch(self, begun: list[Trainee], referee: Referee, table: FleetDisplay) -> None:
        """Look on until all jobs have ended; give up those that hang."""
        left = begun
        while left:
            stuck = self._dispatcher.look_around(self._deadline_seconds)
            for trainee in left:
                if stuck is trainee.place:
                    error = overdue(stuck, self._deadline_seconds)
                    trainee.settle("failed", error)
                    self._dispatcher.give_up(stuck, str(error))
                    referee.gone(trainee.name)
            table.update()
            left = [trainee for trainee in left if not self._has_ended(trainee)]

    def _has_ended(self, trainee: Trainee) -> bool:
        is_given_up = trainee.place.why_gone is not None
        return is_given_up or trainee.wait(_LOOK_SECONDS / len(self._trainees))

    def _end(self, referee: Referee, why: str) -> None:
        self._dispatcher.close(why)
        referee.close(why)
        end = time.monotonic() + _GRACE_SECONDS
        have_ended = [trainee.wait(max(0.0, end - time.monotonic())) for trainee in self._trainees]
        if all(have_ended):
            self._dispatcher.rest()

    def _results(self, stop: Stop) -> FleetResults:
        results = {trainee.name: trainee.result() for trainee in self._trainees}
        jobs = [
            results.get(name) or JobResult(name, "failed", (), error=self._unbuilt[name])
            for name in self._names
        ]
        ended = {
            job.name: f"{job.status} at step {job.steps}" for job in jobs if job.status != "done"
        }
        turns = sorted(self._dispatcher.turns, key=lambda turn: (turn.start, turn.device))
        unit = max((turn.end - turn.start for turn in turns), default=0.0)
        seconds = dict.fromkeys(self._names, 0.0)
        for turn in turns:
            seconds[turn.job] += turn.end - turn.start
        least = bound([*seconds.values()], self._num_devices, unit)
        timeline = FleetTimeline(
            jobs=self._names,
            num_devices=self._num_devices,
            turns=tuple(turns),
            source="measured",
            policy=self._policy,
            bound_seconds=least.seconds,
            ended=ended,
        )
        return FleetResults(jobs, timeline, least, stop.metric, stop.largest)

    def simulate(
        self, stop: Stop | None = None, *, steps: int | None = None, epochs: int | None = None
    ) -> FleetTimeline:
        """The prediction of what ``run`` does with these arguments, from the beginning of all jobs;
        of a halving, that those jobs go on that take longest.

        Raises:
            InputError: nobody says how long jobs train, or the length of a job's data is unknown.
        """
        ends, tasks = self._tasks(stop, steps, epochs)
        return simulate_fleet(tasks, self._num_devices, self._policy, ends)

    def bound(
        self, stop: Stop | None = None, *, steps: int | None = None, epochs: int | None = None
    ) -> Bound:
        """The time that no order of the visits could undercut, as predicted, where no job stops
        early.

        Raises:
            InputError: as ``simulate``.
        """
        _, tasks = self._tasks(stop, steps, epochs)
        return bound_of(tasks, self._num_devices)

    def _tasks(
        self, stop: Stop | None, steps: int | None, epochs: int | None
    ) -> tuple[Stop, list[TimedJob]]:
        jobs = [trainee.job for trainee in self._trainees]
        ends = settled(stop, steps, epochs, [job.steps is not None for job in jobs])
        return ends, [
            task_of(trainee.name, trainee.job, ends, len(jobs))._replace(
                only=self._homes[trainee.name]
            )
            for trainee in self._trainees
        ]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint of every job that has not failed, between runs, each into a folder of
        its own.

        Raises:
            FileError: a file could not be written.
        """
        for trainee in self._trainees:
            if trainee.error is None:
                trainee.save(Path(folder))

    def load(self, folder: str | os.PathLike[str]) -> dict[str, int]:
        """Go on from the latest checkpoint of every job that has one.

        Returns:
            By name, how many minibatches the job was trained on.

        Raises:
            FileError: one is of another model, or no fleet has written it.
        """
        for trainee in self._trainees:
            trainee.load(Path(folder))
        return {trainee.name: trainee.step for trainee in self._trainees}

    def close(self) -> None:
        """End all pipelines, and give back what is on tiers. Leaving the ``with`` block does it.

        Raises:
            InputError: a layer calls it.
        """
        for trainee in self._trainees:
            trainee.pipeline._parts.check_outside()
        self._is_closed = True
        self._dispatcher.close("the fleet is closed")
        for trainee in self._trainees:
            with suppress(PenstockError):  # all checkpoints are written by now
                trainee.pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def task_of(name: str, job: Job, stop: Stop, num_jobs: int) -> TimedJob:
    """A job, as far as its time goes.

    Raises:
        InputError: the length of its data is unknown.
    """
    tier = "" if job.plan.spill is None else str(job.plan.spill.tier)
    targets = stop.targets(num_jobs, job.most_steps(stop))
    if not targets:
        raise InputError(
            f"job {name}: nobody knows how many minibatches an epoch has, since its data has no "
            "len(); give steps"
        )
    return TimedJob(name, job.visits, targets[-1], tier)


def _check_metric(trainee: Trainee, stop: Stop) -> None:
    known = ["loss", *(trainee.job.options.get("metrics") or {})]
    if stop.every and stop.metric not in known:
        raise InputError(
            f"job {trainee.name} has no metric {stop.metric!r}, by which jobs are compared; give "
            f"metrics={{{stop.metric!r}: …}}, or take {' or '.join(known)}"
        )


def _trained_by(trainee: Trainee) -> set[int]:
    """The identities of what a job changes."""
    stages = trainee.pipeline.stages.values()
    own = {id(parameter) for stage in stages for parameter in stage.parameters()}
    scaler = trainee.job.options.get("grad_scaler")
    return own if scaler is None else own | {id(scaler)}


def _built(name: str, job: Job, device: torch.device) -> Pipeline:
    try:
        return job.build(device)
    except InputError as error:
        raise InputError(f"job {name}: {told(error)}") from error
    except Exception as error:
        error.add_note(f"This was job {name} of the fleet.")
        raise
