"""A method whose ranks are processes: started once, and asked for a turn at a time.

Threads of one process sum gradients where they are, so ways to sum can only be told apart between
processes. Each process makes the workload itself and goes through the same
minibatches; only numbers travel to the contest.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.base.errors import DeadlineError, RunError
from penstock.core.cluster import SpareMachine
from penstock.core.summation.frames import key_of
from penstock.core.summation.server import SummationServer
from penstock.core.timing.timeline import Timeline
from penstock.engine.device.accelerators import HOST_BACKEND
from penstock.planning.plans import Plan
from penstock.training.pipeline import Pipeline
from penstock.trial.workload import Batch, Workload

_JOB = "contest"
_PLENTY = 1e9
"""Bytes per second of a server on this machine, of whose links nobody knows anything."""


@dataclass(frozen=True)
class _Seat:
    """What a process needs to know.

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
                seat = _Seat(rank, num_processes, str(meeting), load, plan.to_json())
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
        seconds, losses, recorded = self._ask(("train", len(batches)))
        self.seconds += seconds
        self.losses += losses
        self.timelines.append(Timeline.from_json(recorded))

    def held_out_loss(self) -> float | None:
        """The loss on the workload's held-out data; ``None`` without any."""
        value: float | None = self._ask(("evaluate", 0))
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

    def _ask(self, request: tuple[str, int]) -> Any:
        if self._start_seconds is not None:  # several groups begin at once, and nobody waits
            self._answers(self._start_seconds)
            self._start_seconds = None
        for connection in self._connections:
            connection.send(request)
        return self._answers(self._deadline_seconds)[0]

    def _answers(self, seconds: float) -> list[Any]:
        """What each process answers, by rank; the first failure ends the wait."""
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
    return server, plan.summed_by("servers", [machine])


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """What is started meanwhile never gets Ctrl-C, not even while Python starts: a terminal sends
    it to all processes, but the contest ends its own."""
    resource_tracker.ensure_running()  # whose start would let signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(seat: _Seat, connection: Connection) -> None:
    """A process: build, then train and evaluate as asked, until the contest ends."""
    try:
        _Member(seat).serve(connection)
    except EOFError:
        return  # the contest has ended
    except BaseException as error:
        connection.send((f"{type(error).__name__}: {error}", None))


class _Member:
    """The trainer in one of the processes."""

    def __init__(self, seat: _Seat) -> None:
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

    def _train(self, count: int) -> tuple[list[float], list[float], str]:
        seconds, losses = [], []
        for batch in islice(self._batches, count):
            start = time.perf_counter()
            loss = self._pipeline.step(*batch)
            assert loss is not None  # it tells its results
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
        return seconds, losses, self._pipeline.timeline.to_json()

    def _evaluate(self) -> float | None:
        if self._workload.held_out is None:
            return None
        inputs, targets = self._workload.held_out
        return float(self._workload.loss(self._pipeline.evaluate(inputs), targets))
