"""``Entrant``: one method that takes part: it trains in turns, and keeps its results; and
``InProcesses``, for methods whose ranks are processes, started once and asked for a turn at a time.

Threads of one process sum gradients where they are, so ways to sum can only be told apart between
processes. Each process makes the workload itself and goes through the same minibatches; only
numbers travel to the contest.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.base.errors import DeadlineError, PenstockError, RunError
from penstock.core.cluster import SpareMachine
from penstock.core.summation.frames import key_of
from penstock.core.summation.server import SummationServer
from penstock.core.timing.timeline import Timeline
from penstock.drawing.contest import LossPoint
from penstock.engine.device.accelerators import HOST_BACKEND
from penstock.planning.plans import Plan
from penstock.training.pipeline import Pipeline
from penstock.training.profiler.disturbance import Usage, share_of_others
from penstock.trial.contest.methods import ContestSetting, Method
from penstock.trial.workload import (
    Batch,
    Contestant,
    Workload,
    intra_op_threads,
)


@dataclass
class Entrant:
    """One method that takes part.

    Attributes:
        method: the method.
        plan: how it spreads the workload; ``None`` if it cannot.
        trainer: trains; ``None`` before it was built and after it failed.
        where: where it runs, in words.
        reason: why it does not run, or ran no further.
        points: its losses, as far as it got.
        activation_bytes: counted, by rank.
        paced_seconds: a step on emulated devices.
        paced: the timeline of those.
        difference: of its losses from one device's, relative to the largest.
    """

    method: Method
    plan: Plan | None = None
    trainer: Trainer | None = None
    where: str = ""
    reason: str = ""
    points: list[LossPoint] = field(default_factory=list)
    activation_bytes: tuple[int, ...] = ()
    paced_seconds: float | None = None
    paced: Timeline | None = None
    difference: float | None = None

    @property
    def takes_part(self) -> bool:
        """Whether it has not failed so far."""
        return not self.reason

    def attempt(self, do: Callable[[], None]) -> None:
        """Do something for this method only: if it raises, the method ends, alone, and says why."""
        try:
            do()
        except PenstockError as error:
            self.stop(str(error))
        except Exception as error:
            self.stop(f"{type(error).__name__}: {error}")

    def stop(self, reason: str) -> None:
        """End this method; the others go on."""
        self.reason = " ".join(reason.split())
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            self._close_quietly(trainer)

    @staticmethod
    def _close_quietly(trainer: Trainer) -> None:
        try:
            trainer.close()
        except Exception:
            return  # its reason is told already; this only follows from it

    def note_loss(self) -> None:
        """Add the loss after the steps so far to ``points``."""
        assert self.trainer is not None
        value = self.trainer.held_out_loss()
        if value is None:
            recent = self.trainer.losses[-_RECENT:]
            value = statistics.fmean(recent)
        step = len(self.trainer.losses)
        self.points.append(LossPoint(step=step, loss=value if isfinite(value) else None))

    def close(self) -> None:
        """End its workers, if it has any."""
        if self.trainer is not None:
            self.attempt(self.trainer.close)


_RECENT = 5
"""Without held-out data, a loss is the mean of so many training losses."""


def counted_bytes(setting: ContestSetting, plan: Plan, batches: Sequence[Batch]) -> tuple[int, ...]:
    """The bytes of activations that each rank held at most, counted in a run of its own: counting
    takes time, which must not be the contest's."""
    workload = setting.workload
    with (
        intra_op_threads(plan.num_threads),
        Pipeline(
            workload.build_model(),
            plan,
            loss=workload.loss,
            optimizer=workload.optimizer,
            transport="threads",
            seed=0,
            count_memory=True,
        ) as pipeline,
    ):
        for _ in pipeline.steps(batches):
            pass
        return tuple(peak.activation_bytes for peak in pipeline.peaks)


_JOB = "contest"
_PLENTY = 1e9
"""Bytes per second of a server on this machine, of whose links nobody knows anything."""


@dataclass(frozen=True)
class _Assignment:
    """The part of one process in the group.

    Attributes:
        rank, num_ranks: of the process.
        meeting: the file through which processes find each other.
        load: makes the workload.
        plan: as JSON.
    """

    rank: int
    num_ranks: int
    meeting: str
    load: Callable[[], Workload]
    plan: str


class _TurnReport(NamedTuple):
    """The results of one process in a turn.

    Attributes:
        seconds, losses: an entry per step.
        timeline: of the last step, as JSON.
        processor_seconds: that the process has worked meanwhile.
    """

    seconds: list[float]
    losses: list[float]
    timeline: str
    processor_seconds: float


class InProcesses:
    """A trainer whose ranks are processes of this machine.

    Args:
        load: makes the workload; a function that other processes can import.
        plan: what they run.
        num_processes: the plan's ranks, and those that only sum.
        folder: where they meet.
        start_seconds: how long they may take to import torch, to build and to meet.
        deadline_seconds: how long a turn may take.

    Raises:
        RunError: one of them failed; says why.
        DeadlineError: one of them did not answer.
    """

    def __init__(
        self,
        load: Callable[[], Workload],
        plan: Plan,
        num_processes: int,
        folder: str,
        start_seconds: float = 600.0,
        deadline_seconds: float = 600.0,
    ) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.timelines: list[Timeline] = []
        self.others: list[float] = []
        self._deadline_seconds = deadline_seconds
        self._server, plan = _with_server(plan)
        started = multiprocessing.get_context("spawn")
        meeting = Path(folder) / f"meeting-{time.monotonic_ns()}"
        self._connections: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        self._start_seconds: float | None = start_seconds
        """``None`` once they have begun."""
        try:
            for rank in range(num_processes):
                ours, theirs = started.Pipe()
                self._connections.append(ours)
                seat = _Assignment(rank, num_processes, str(meeting), load, plan.to_json())
                process = started.Process(target=_serve, args=(seat, theirs), daemon=True)
                with interrupts_held_back():
                    process.start()  # raises if ``load`` cannot be sent
                self._processes.append(process)
                theirs.close()
        except BaseException:
            self.close()
            raise

    def take_turn(self, batches: Sequence[Batch]) -> None:
        """Train on as many minibatches, which each process makes itself."""
        before = Usage.now()
        turns: list[_TurnReport] = self._ask(("train", len(batches)))
        # What the processes of this trainer had is its own.
        own = before.own_seconds - sum(turn.processor_seconds for turn in turns)
        share = share_of_others(before._replace(own_seconds=own), Usage.now())
        first = turns[0]
        self.seconds += first.seconds
        self.losses += first.losses
        self.others += [share] * len(first.seconds)
        self.timelines.append(Timeline.from_json(first.timeline))

    def held_out_loss(self) -> float | None:
        """The loss on the workload's held-out data; ``None`` without any."""
        value: float | None = self._ask(("evaluate", 0))[0]
        return value

    def close(self) -> None:
        """End the processes; at once if they have not begun, since they would finish that first."""
        if self._start_seconds is not None:
            for process in self._processes:
                process.kill()
        for connection in self._connections:
            try:
                connection.send(("end", 0))
            except OSError:
                continue  # it has ended
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._connections, self._processes = [], []
        if self._server is not None:
            self._server.close()
            self._server = None

    def _ask(self, request: tuple[str, int]) -> list[Any]:
        if self._start_seconds is not None:  # several groups begin at once, and nobody waits
            self._answers(self._start_seconds)
            self._start_seconds = None
        for connection in self._connections:
            connection.send(request)
        return self._answers(self._deadline_seconds)

    def _answers(self, seconds: float) -> list[Any]:
        """The answers of all processes, by rank; the first failure ends the wait."""
        end = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            open_ = [c for rank, c in enumerate(self._connections) if rank not in answers]
            ready = wait(open_, max(0.0, end - time.monotonic()))
            if not ready:
                raise DeadlineError(f"a process of the contest did not answer in {seconds:g} s")
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    failure, answer = self._connections[rank].recv()
                except EOFError:
                    raise RunError(f"process {rank} of the contest died") from None
                if failure:
                    raise RunError(failure)
                answers[rank] = answer
        return [answers[rank] for rank in sorted(answers)]


def _with_server(plan: Plan) -> tuple[SummationServer | None, Plan]:
    """The plan with a server on this machine, if its copies sum with one."""
    if plan.summing.reducer != "servers":
        return None, plan
    server = SummationServer("127.0.0.1", 0, key_of("", _JOB))
    host, port = server.address[:2]
    machine = SpareMachine(name="here", bytes_per_second=_PLENTY, address=f"{host}:{port}")
    return server, plan.with_reducer("servers", [machine])


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Keep Ctrl-C from processes that are started meanwhile, even while Python starts: a terminal
    sends it to all processes, but the contest ends its own."""
    resource_tracker.ensure_running()  # whose start would let signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(seat: _Assignment, connection: Connection) -> None:
    """A process: build, then train and evaluate as asked, until the contest ends."""
    try:
        _ProcessTrainer(seat).serve(connection)
    except EOFError:
        return  # the contest has ended
    except BaseException as error:
        connection.send((f"{type(error).__name__}: {error}", None))


class _ProcessTrainer:
    """The trainer in one of the processes."""

    def __init__(self, seat: _Assignment) -> None:
        os.environ.update(
            RANK=str(seat.rank), LOCAL_RANK=str(seat.rank), WORLD_SIZE=str(seat.num_ranks),
            MASTER_ADDR="127.0.0.1", PENSTOCK_JOB=_JOB,
        )  # fmt: skip
        os.environ.pop("PENSTOCK_SECRET", None)  # the server of the contest has none
        plan = Plan.from_json(seat.plan)
        torch.set_num_threads(plan.num_threads)
        dist.init_process_group(
            HOST_BACKEND,
            init_method=f"file://{seat.meeting}",
            rank=seat.rank,
            world_size=seat.num_ranks,
        )
        self._workload = seat.load()
        self._batches: Iterator[Batch] = self._workload.batches()
        self._pipeline = Pipeline(
            self._workload.build_model(),
            plan,
            loss=self._workload.loss,
            optimizer=self._workload.optimizer,
            seed=0,
        )

    def serve(self, connection: Connection) -> None:
        """Answer until the contest ends."""
        connection.send(("", None))
        while True:
            asked, count = connection.recv()
            if asked == "end":
                self._pipeline.close()
                return
            connection.send(("", self._train(count) if asked == "train" else self._evaluate()))

    def _train(self, count: int) -> _TurnReport:
        seconds, losses, before = [], [], time.process_time()
        for batch in islice(self._batches, count):
            start = time.perf_counter()
            loss = self._pipeline.step(*batch)
            assert loss is not None  # it tells its results
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
        worked = time.process_time() - before
        return _TurnReport(seconds, losses, self._pipeline.timeline.to_json(), worked)

    def _evaluate(self) -> float | None:
        if self._workload.held_out is None:
            return None
        inputs, targets = self._workload.held_out
        return float(self._workload.loss(self._pipeline.evaluate(inputs), targets))


Trainer = Contestant | InProcesses
"""Something that trains in turns, wherever its ranks are."""
