"""Where the ranks of a rehearsal live: in processes of their own, or in threads of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import IO

import msgspec

from penstock.base import errors
from penstock.base.errors import RunError
from penstock.training.rehearsal.job import Job, RehearsalTransport
from penstock.training.rehearsal.reports import Failed, Line, StepTimes

_GRACE_SECONDS = 2.0


def perform(job: Job, transport: RehearsalTransport) -> Generator[StepTimes]:
    """The times of each step as it ends. Close it to end the rehearsal; no rank stays behind.

    Raises:
        RunError: a rank has failed or died; the first failure.
    """
    return _in_threads(job) if transport == "threads" else _in_processes(job)


def _in_processes(job: Job) -> Generator[StepTimes]:
    with tempfile.TemporaryFile() as complaints, _launcher(complaints) as launcher:
        assert launcher.stdin is not None and launcher.stdout is not None
        with suppress(BrokenPipeError):  # then the reason stands among the complaints
            launcher.stdin.write(msgspec.json.encode(job) + b"\n")
            launcher.stdin.flush()
        for _ in range(job.num_steps):
            line = launcher.stdout.readline()
            if not line:
                raise RunError(_last_words(launcher, complaints))
            report = msgspec.json.decode(line, type=Line)
            if isinstance(report, Failed):
                raise getattr(errors, report.kind, RunError)(report.message)
            yield report.times


@contextmanager
def _launcher(complaints: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process that forks the ranks, in a group of its own: an interrupt at the keyboard reaches
    only this process, which then ends them all."""
    launcher = subprocess.Popen(
        # -P: no file in the current folder may stand in for one of Python's modules.
        [sys.executable, "-P", "-m", "penstock.training.rehearsal.launch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        start_new_session=True,
    )
    assert launcher.stdin is not None and launcher.stdout is not None
    try:
        yield launcher
    finally:
        with suppress(BrokenPipeError):
            launcher.stdin.close()  # asks it to end its ranks, and itself
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(_GRACE_SECONDS)
        with suppress(ProcessLookupError):  # as it should be: nobody of the group is left
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        launcher.stdout.close()


def _last_words(launcher: subprocess.Popen[bytes], complaints: IO[bytes]) -> str:
    code = launcher.wait()
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    return f"the rehearsal's processes ended with exit code {code}: {lines[-1] if lines else '–'}"


def _in_threads(job: Job) -> Generator[StepTimes]:
    # Here, so that who rehearses in processes starts without torch.
    from multiprocessing import Pipe

    from penstock.engine.transport import ThreadExchange
    from penstock.training.rehearsal.conductor import Conductor
    from penstock.training.rehearsal.rank import play
    from penstock.training.rehearsal.waits import Alarm

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
        yield from Conductor([here for here, _ in pipes]).steps(
            job.num_steps, overlapping=job.overlapping
        )
    finally:
        for transport in exchange.transports:
            transport.fail("the rehearsal has ended", ())
        for here, _ in pipes:
            here.close()
        for thread in threads:
            thread.join(_GRACE_SECONDS)
