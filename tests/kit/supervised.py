"""Jobs under ``penstock run``, and what is left of them.

    python -m tests.kit.supervised

is a process that has loaded what supervisors load, and forks itself into them: a supervisor of its
own would load torch for seconds in every test.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.kit.launch import ENVIRONMENT
from tests.kit.paths import ROOT
from tests.kit.waiting import until

LIMIT_SECONDS = 380

# Ctrl-C is ignored by what a script starts in the background, and so by its tests.
_COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from penstock.cli import main
main()
"""


class Supervised(ABC):
    """A job under a supervisor.

    Attributes:
        process: the supervisor's number.
        output: where it and all ranks print.
    """

    process: int
    output: Path

    @abstractmethod
    def wait(self) -> int:
        """The exit code of the supervisor; minus the number of the signal that ended it."""

    def send(self, number: signal.Signals) -> None:
        """Send the supervisor a signal."""
        os.kill(self.process, number)

    def said(self) -> str:
        """What the supervisor and all ranks have printed so far."""
        return self.output.read_text()


class _Fresh(Supervised):
    """One with an interpreter of its own, as people start it."""

    def __init__(self, output: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.output = output
        with output.open("w") as written:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, "run", *arguments],
                cwd=ROOT,
                env={**ENVIRONMENT, **environment},
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        self.process = self._process.pid

    def wait(self) -> int:
        return self._process.wait(LIMIT_SECONDS)


class _Forked(Supervised):
    """One that is forked from a process which has loaded everything."""

    def __init__(self, output: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.output = output
        self._code: int | None = None
        request = {"output": str(output), "arguments": arguments, "environment": environment}
        self.process = _ask(request)

    def wait(self) -> int:
        if self._code is None:
            self._code = _ask({"wait": self.process})
        return self._code


@contextmanager
def supervised(output: Path, *arguments: object, fresh=False, **environment: str):
    """``penstock run ARGUMENTS``, which is ended at the end of the block if it has not."""
    kind = _Fresh if fresh else _Forked
    job = kind(output, [*map(str, arguments)], environment)
    try:
        yield job
    finally:
        with suppress(ProcessLookupError):
            job.send(signal.SIGKILL)
        job.wait()


def _ask(request) -> int:
    """What the process that forks supervisors answers."""
    template = _template()
    template.stdin.write(json.dumps(request).encode() + b"\n")
    template.stdin.flush()
    assert select.select([template.stdout], [], [], LIMIT_SECONDS)[0], "the job has not ended"
    return int(template.stdout.readline())


@cache
def _template() -> subprocess.Popen:
    """The process that supervisors are forked from; it ends with this one, whose pipe it reads."""
    template = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.supervised"],
        cwd=ROOT,
        # What is printed into a file waits in a buffer, as it does for most people.
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(template.communicate)
    return template


def main() -> None:
    """Serve requests, a line of JSON each, until there are no more."""
    import tests.kit.helpers  # noqa: F401 - for the ranks, which then need not load it
    from penstock.training.supervisor.supervising import load

    load()
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        supervisor = os.fork()
        if supervisor == 0:
            be_supervisor(request)
            return
        print(supervisor, flush=True)


def be_supervisor(request) -> None:
    """Do what the command does."""
    from penstock.cli import main as command
    from tests.kit.template import redirect

    os.setsid()
    redirect(request["output"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= request["environment"]
    sys.argv = ["penstock", "run", *request["arguments"]]
    command()


def number_in(path: Path, limit_seconds: float = LIMIT_SECONDS) -> int:
    """What a process has written into a file, as soon as it is there."""
    assert until(path.exists, limit_seconds), f"{path} is not there"
    return int(path.read_text())


def children(process: int) -> set[int]:
    """The processes that a process has started and not waited for."""
    return {
        int(number)
        for task in Path(f"/proc/{process}/task").iterdir()
        for number in (task / "children").read_text().split()
    }


def wait_until_gone(processes, limit_seconds: float = 60) -> None:
    """Fail unless all processes end in time."""
    assert until(lambda: not any(map(is_there, processes)), limit_seconds), [
        number for number in processes if is_there(number)
    ]


def is_there(process: int) -> bool:
    """Whether a process is there, were it only to be waited for."""
    return Path(f"/proc/{process}").exists()


def num_descriptors(process: int, limit_seconds: float = LIMIT_SECONDS) -> int:
    """How many files and sockets a supervisor has open, as soon as it watches all processes that it
    has forked: the last one may have said that it is there before."""
    opened = []

    def watches_all():
        opened[:] = _opened_by(process)
        return opened.count("anon_inode:[pidfd]") == len(children(process))

    assert until(watches_all, limit_seconds), opened
    return len(opened)


def _opened_by(process: int) -> list[str]:
    """What a process has open, by the names that the kernel has for it."""
    found = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed meanwhile
            found.append(str(link.readlink()))
    return found


if __name__ == "__main__":
    main()
