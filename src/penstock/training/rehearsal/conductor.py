"""A rehearsal under way: its job, where its ranks live, and the conductor, who lets all of them
begin at one moment and says what failed first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple

import msgspec
from msgspec import field

from penstock.base import errors
from penstock.base.errors import RunError
from penstock.base.values import Value
from penstock.core.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.versions import Flush, Policy
from penstock.training.rehearsal import RehearsalTransport, UpdateMode, WaitsName
from penstock.training.rehearsal.result import StepTimes

_LEAD_SECONDS, _LEAD_PER_RANK_SECONDS = 5e-3, 0.5e-3
_CAUSE_SECONDS = 5.0
_END_SECONDS = 2.0


class RehearsalJob(Value, frozen=True, kw_only=True):
    """One rehearsal.

    Attributes:
        ops: a lowered schedule as CSV; slices are microbatches of their own (``flattened``).
        costs: seconds of these ops.
        num_steps: how often to perform them, warm-up included.
        message_bytes: the size of an output, and of its gradient.
        waits: what ops do instead of computing.
        updates: whether stages update each for itself, when all ranks have agreed, or on trust. In
            the last case ranks go from step to step without waiting for each other's ends.
        versions: the policy of a stream, all of which is one step.
        deadline_seconds: how long a receive waits.
    """

    ops: str
    costs: Costs
    num_steps: int
    message_bytes: int
    waits: WaitsName
    updates: UpdateMode = "separate"
    versions: Policy = field(default_factory=Flush)
    deadline_seconds: float

    @property
    def overlapping(self) -> bool:
        """Whether steps follow each other without a common start."""
        return self.updates == "post-validated"

    def schedule(self) -> Schedule:
        """The ops, read."""
        return Schedule.parse(self.ops)


class ReportedFailure(NamedTuple):
    """The last words of a rank that fails.

    Attributes:
        kind: the class of the error.
        message: its text.
        followed: it is only about another rank's failure.
    """

    kind: str
    message: str
    followed: bool


class Conductor:
    """Talks to the ranks of one rehearsal.

    Args:
        channels: to each rank; it answers once when it is ready and once after each step.
        watched: what becomes readable when something has ended that must not.
        death: says what that is; empty if nothing has.
    """

    def __init__(
        self,
        channels: Sequence[Connection],
        watched: Sequence[int] = (),
        death: Callable[[], str] = str,
    ) -> None:
        self._channels = channels
        self._watched = watched
        self._death = death

    def steps(self, num_steps: int, *, overlapping: bool = False) -> Iterator[StepTimes]:
        """Let the ranks perform, give the times of each step as it ends, and dismiss the ranks.

        Args:
            overlapping: each rank begins a step when its own last one has ended; otherwise all
                begin together.

        Raises:
            RunError: a rank has failed or died.
        """
        self._answers("before the first step")
        lead = _LEAD_SECONDS + _LEAD_PER_RANK_SECONDS * len(self._channels)
        if overlapping:
            start = time.perf_counter() + lead
            for _ in range(num_steps):
                self._say(start)
        for step in range(num_steps):
            if not overlapping:
                self._say(time.perf_counter() + lead)
            yield self._answers(f"in step {step + 1} of {num_steps}")
        self._say(None)

    def _say(self, start: float | None) -> None:
        for channel in self._channels:
            with suppress(OSError):  # who has ended hears nothing, which shows in the answers
                channel.send(start)

    def _answers(self, when: str) -> list[Any]:
        """One answer of each rank."""
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._channels):
            trouble = self._listen(answers, None)
            if trouble or any(isinstance(answer, ReportedFailure) for answer in answers.values()):
                raise self._cause(answers, when)
        return [answers[channel] for channel in self._channels]

    def _listen(self, answers: dict[Connection, Any], seconds: float | None) -> bool:
        """Take what answers have come; whether something has ended."""
        missing = [channel for channel in self._channels if channel not in answers]
        ready = wait([*missing, *self._watched], seconds)
        for channel in missing:
            if channel in ready:
                answers[channel] = _received(channel)
        return any(channel in self._watched for channel in ready)

    def _cause(self, answers: dict[Connection, Any], when: str) -> RunError:
        """The first failure: news of it may have come to a neighbour sooner than here."""
        end = time.monotonic() + _CAUSE_SECONDS
        while True:
            failures = [
                answer for answer in answers.values() if isinstance(answer, ReportedFailure)
            ]
            first = next((failure for failure in failures if not failure.followed), None)
            if first is not None:
                return _error(first)
            if death := self._death():
                return RunError(f"{death} {when} of the rehearsal")
            remaining = end - time.monotonic()
            # All may have said that another has gone, before it is known how that one ended.
            if failures and remaining <= 0:
                return _error(failures[0])
            self._listen(answers, max(remaining, 0.01))


def _received(channel: Connection) -> Any:
    try:
        return channel.recv()
    except (EOFError, OSError):
        return ReportedFailure("RunError", "a rank has ended without a word", followed=True)


def _error(failure: ReportedFailure) -> RunError:
    """The error that a rank told of, in its own class if that is one of ours."""
    kind = getattr(errors, failure.kind, RunError)
    return kind(failure.message) if issubclass(kind, RunError) else RunError(failure.message)


def perform(job: RehearsalJob, transport: RehearsalTransport) -> Generator[StepTimes]:
    """The times of each step as it ends. Close it to end the rehearsal; no rank stays behind.

    Raises:
        RunError: a rank has failed or died; the first failure.
    """
    with _in_threads(job) if transport == "threads" else _in_processes(job) as conductor:
        yield from conductor.steps(job.num_steps, overlapping=job.overlapping)


@contextmanager
def _in_threads(job: RehearsalJob) -> Iterator[Conductor]:
    # Here, so that who rehearses in processes starts without torch.
    from penstock.engine.transport import ThreadExchange
    from penstock.training.rehearsal.emulated import Alarm
    from penstock.training.rehearsal.launch import play

    num_ranks = job.schedule().num_ranks
    exchange = ThreadExchange(num_ranks, job.deadline_seconds)
    alarm = Alarm.calibrated()
    pipes = [Pipe() for _ in range(num_ranks)]
    threads = [
        threading.Thread(
            target=play, args=(job, rank, lambda own=own: own, alarm, there), daemon=True
        )
        for rank, (own, (_, there)) in enumerate(zip(exchange.transports, pipes, strict=True))
    ]
    try:
        for thread in threads:
            thread.start()
        yield Conductor([here for here, _ in pipes])
    finally:
        for transport in exchange.transports:
            transport.fail("the rehearsal has ended", ())
        for here, _ in pipes:
            here.close()
        for thread in threads:
            thread.join(_END_SECONDS)


@contextmanager
def _in_processes(job: RehearsalJob) -> Iterator[Conductor]:
    pipes = [Pipe() for _ in range(job.schedule().num_ranks)]
    try:
        ends = [there.fileno() for _, there in pipes]
        with tempfile.TemporaryFile() as complaints, _launcher(ends, complaints) as launcher:
            for _, there in pipes:
                there.close()
            assert launcher.stdin is not None and launcher.stdout is not None
            with suppress(BrokenPipeError):  # then the reason stands among the complaints
                launcher.stdin.write(msgspec.json.encode(job) + b"\n")
                launcher.stdin.flush()
            watched = launcher.stdout.fileno()
            death = partial(_death, launcher, complaints)
            yield Conductor([here for here, _ in pipes], [watched], death)
    finally:
        for pipe in pipes:
            for end in pipe:
                end.close()


@contextmanager
def _launcher(ends: Sequence[int], complaints: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process that forks the ranks, in a group of its own: an interrupt at the keyboard reaches
    only this process, which then ends them all."""
    launcher = subprocess.Popen(
        # -P: no file in the current folder may stand in for one of Python's modules.
        [sys.executable, "-P", "-m", "penstock.training.rehearsal.launch", *map(str, ends)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        start_new_session=True,
        pass_fds=ends,
    )
    assert launcher.stdin is not None and launcher.stdout is not None
    try:
        yield launcher
    finally:
        with suppress(BrokenPipeError):
            launcher.stdin.close()  # asks it to end its ranks, and itself
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(_END_SECONDS)
        with suppress(ProcessLookupError):  # as it should be: nobody of the group is left
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        launcher.stdout.close()


def _death(launcher: subprocess.Popen[bytes], complaints: IO[bytes]) -> str:
    """Which rank has ended that must not have, as the launcher says; empty if none has.

    Raises:
        RunError: the launcher itself has.
    """
    assert launcher.stdout is not None
    if not wait([launcher.stdout.fileno()], 0):
        return ""
    if line := launcher.stdout.readline():
        return line.decode().strip()
    code = launcher.wait()
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "–"
    raise RunError(f"the rehearsal's processes ended with exit code {code}: {last}")
