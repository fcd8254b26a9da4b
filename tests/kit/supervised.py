"""Jobs under ``penstock run``, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.kit.launch import ENVIRONMENT
from tests.kit.paths import ROOT

LIMIT_SECONDS = 380

# Ctrl-C is ignored by what a script starts in the background, and so by its tests.
_COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from penstock.cli import main
main()
"""


class Supervised(NamedTuple):
    """A job under a supervisor, which runs."""

    supervisor: subprocess.Popen
    output: Path

    def wait(self) -> int:
        """The exit code of the supervisor."""
        return self.supervisor.wait(LIMIT_SECONDS)

    def said(self) -> str:
        """What the supervisor and all ranks have printed so far."""
        return self.output.read_text()


@contextmanager
def supervised(output: Path, *arguments: object, **environment: str):
    """``penstock run ARGUMENTS``, which is ended at the end of the block if it has not."""
    with output.open("w") as written:
        supervisor = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "run", *map(str, arguments)],
            cwd=ROOT,
            env={**ENVIRONMENT, **environment},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Supervised(supervisor, output)
    finally:
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()


def number_in(path: Path, limit_seconds: float = LIMIT_SECONDS) -> int:
    """What a process has written into a file, as soon as it is there."""
    end = time.monotonic() + limit_seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} is not there"
        time.sleep(0.002)
    return int(path.read_text())


def children(process: int) -> dict[int, str]:
    """The processes that a process has started and not waited for, and their states."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = stat.read_text().partition(" ")
        except OSError:
            continue
        state, parent = rest.rpartition(")")[2].split()[:2]
        if int(parent) == process:
            found[int(number)] = state
    return found


def wait_until_gone(processes, limit_seconds: float = 60) -> None:
    """Fail unless all processes end in time."""
    end = time.monotonic() + limit_seconds
    while alive := [number for number in processes if is_alive(number)]:
        assert time.monotonic() < end, f"{alive} are still there"
        time.sleep(0.01)


def is_alive(process: int) -> bool:
    """Whether a process is there that is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def num_descriptors(process: int) -> int:
    """How many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{process}/fd"))
