"""The process that forks the ranks of a rehearsal: ``python -m training.rehearsal.launch``.

A process of its own, because only one without threads can be forked safely, and who asks for a
rehearsal may have any number of them. It reads a ``Job`` from standard input, writes ``reports`` to
standard output, and ends all ranks when its standard input is closed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import msgspec
import torch

from penstock.base.errors import RunError
from penstock.engine.transport import SharedMemoryExchange
from penstock.training.rehearsal.conductor import Conductor
from penstock.training.rehearsal.job import Job
from penstock.training.rehearsal.rank import play
from penstock.training.rehearsal.reports import Failed, Line, StepDone
from penstock.training.rehearsal.waits import Alarm


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
