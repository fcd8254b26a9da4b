"""The process that forks the ranks of a rehearsal: ``python -m training.rehearsal.launch``.

A process of its own, because only one without threads can be forked safely, and who asks for a
rehearsal may have any number of them. It reads a ``Job`` from standard input, writes ``reports`` to
standard output, and ends all ranks when its standard input is closed.

The conductor of a rehearsal: lets all ranks begin at one moment, and says what failed first.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import msgspec
import torch

from penstock.base import errors
from penstock.base.errors import RunError
from penstock.engine.transport import SharedMemoryExchange
from penstock.training.rehearsal.conduct import Failed, Job, Line, StepDone, StepTimes
from penstock.training.rehearsal.emulated import Alarm
from penstock.training.rehearsal.rank import Failure, play

_LEAD_SECONDS, _LEAD_PER_RANK_SECONDS = 5e-3, 0.5e-3
_GRACE_SECONDS = 5.0


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
            channel.send(start)

    def _answers(self, when: str) -> list[Any]:
        """One answer of each rank."""
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._channels):
            trouble = self._listen(answers, None)
            if trouble or any(isinstance(answer, Failure) for answer in answers.values()):
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
        """What happened first: news of it may have come to a neighbour sooner than here."""
        end = time.monotonic() + _GRACE_SECONDS
        while True:
            failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
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
        return Failure("RunError", "a rank has ended without a word", followed=True)


def _error(failure: Failure) -> RunError:
    """The error that a rank told of, in its own class if that is one of ours."""
    kind = getattr(errors, failure.kind, RunError)
    return kind(failure.message) if issubclass(kind, RunError) else RunError(failure.message)


class Rank(NamedTuple):
    """A forked rank."""

    process: ForkProcess
    channel: Connection


def main() -> None:
    """Rehearse the job on standard input."""
    job = Job.from_json(sys.stdin.buffer.readline())
    # Before the first kernel: a pool of threads would not survive the fork.
    torch.set_num_threads(1)
    # The first optimizer makes torch load what takes a second: once here, not once in every rank.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    try:
        with _ranks(job) as ranks:
            watched = [sys.stdin.fileno(), *(rank.process.sentinel for rank in ranks)]
            conductor = Conductor([rank.channel for rank in ranks], watched, lambda: _death(ranks))
            for times in conductor.steps(job.num_steps, overlapping=job.overlapping):
                _write(StepDone(times))
            for rank in ranks:
                rank.process.join()
    except (RunError, OSError) as error:
        _write(Failed(type(error).__name__, str(error)))


@contextmanager
def _ranks(job: Job) -> Iterator[list[Rank]]:
    """Fork all ranks; whatever happens, none is left in the end."""
    context = multiprocessing.get_context("fork")
    num_ranks = job.schedule().num_ranks
    exchange = SharedMemoryExchange(num_ranks, job.deadline_seconds)
    alarm = Alarm.calibrated()
    gc.freeze()  # what is there stays: collections in the ranks need not copy its pages
    ranks: list[Rank] = []
    try:
        for number in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_be_rank,
                args=(
                    [here, *(rank.channel for rank in ranks)],
                    (job, number, partial(exchange.transport, number), alarm, there),
                ),
                daemon=True,
            )
            process.start()
            there.close()
            ranks.append(Rank(process, here))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
        exchange.close()


def _be_rank(inherited: Sequence[Connection], play_arguments: tuple[Any, ...]) -> None:
    """In the fork: hold open nothing by whose closing the end of the launcher is seen."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for channel in inherited:
        channel.close()
    play(*play_arguments)


def _death(ranks: Sequence[Rank]) -> str:
    for number, (process, _) in enumerate(ranks):
        code = process.exitcode  # read once: every reading asks the operating system anew
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
            return f"rank {number}'s process was ended by {name}{hint},"
        if code:
            return f"rank {number}'s process ended with exit code {code}"
    asker_is_gone = bool(select.select([sys.stdin], [], [], 0)[0])
    return "who asked for the rehearsal has gone" if asker_is_gone else ""


def _write(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
