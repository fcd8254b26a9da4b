"""Figures come only from a machine that does nothing else meanwhile.

A load average cannot tell a benchmark's own work from that of others, and lags a minute behind.
What can be told is who used the cores: all processes together (``/proc/stat``) less this
benchmark's own tree of processes. Only time in user mode counts, and time that a hypervisor took: a
benchmark of shaped networks makes the system work in interrupts that belong to no process.

``publish(main)`` stands in each benchmark that measures times. It takes two options from the
command line: ``--keep`` or ``--keep=NAME`` stores what was printed in ``benchmarks/results``, with
the command, machine, date and load; ``--loaded`` looks at figures on a machine that others use,
too, and keeps none. ``python -m benchmarks.common.alone --keep=NAME -- penstock contest`` does the
same for any command.
"""

from __future__ import annotations

import io
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

MOST_FOR_OTHERS = 0.05
"""Share of all cores that other programs may use before a figure is not kept."""

RESULTS = Path(__file__).parents[1] / "results"
_LOOK_SECONDS = 2.0
_WITHIN = "PENSTOCK_BENCHMARK"  # set for the processes that a benchmark starts
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """What the cores have done since the machine started, in seconds.

    Attributes:
        everybody: of all processes in user mode, and what the hypervisor took.
        own: of one tree of processes, with those that have ended.
        clock: when it was read.
    """

    everybody: float
    own: float
    clock: float

    @classmethod
    def now(cls, root: int) -> Usage:
        """Read for the tree of processes below ``root``, itself included."""
        words = Path("/proc/stat").read_text().splitlines()[0].split()
        user, nice, steal = (int(words[index]) for index in (1, 2, 8))
        own = sum(_user_ticks_of_tree(root))
        return cls(
            (user + nice + steal) / _TICKS_PER_SECOND, own / _TICKS_PER_SECOND, time.monotonic()
        )


def share_of_others(before: Usage, after: Usage) -> float:
    """Part of all cores, 0 to 1, that others have used between two readings."""
    others = (after.everybody - before.everybody) - (after.own - before.own)
    cores = os.cpu_count() or 1
    return max(0.0, others / ((after.clock - before.clock) * cores))


def _user_ticks_of_tree(root: int) -> Iterable[int]:
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended since
            process = int(folder.name)
            parents[process] = int(words[1])
            ticks[process] = int(words[11]) + int(words[13])  # its own, and of children that ended
    for process, spent in ticks.items():
        ancestor = process
        while ancestor in parents and ancestor != root:
            ancestor = parents[ancestor]
        if ancestor == root:
            yield spent


@dataclass(frozen=True)
class Surroundings:
    """Where and when figures were taken, and who used the machine meanwhile.

    Attributes:
        load_before: the load average of a minute when it began.
        load_after: the same at the end; the benchmark itself is part of it.
        others: share of all cores, 0 to 1, that other programs used meanwhile.
        minutes: that it took.
    """

    load_before: float
    load_after: float
    others: float
    minutes: float
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))

    @property
    def alone(self) -> bool:
        """Whether figures taken here may be kept."""
        return self.others <= MOST_FOR_OTHERS

    def __str__(self) -> str:
        return (
            f"{self.date}, {os.cpu_count()} cores of {_processor()}, torch {version('torch')}, "
            f"load {self.load_before:.1f} before and {self.load_after:.1f} after, other programs "
            f"used {self.others:.1%} of the cores, {self.minutes:.1f} minutes"
        )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


class Loaded(SystemExit):
    """Other programs use the machine, so no figure is kept."""

    def __init__(self, others: float, when: str) -> None:
        super().__init__(
            f"other programs {when} {others:.0%} of this machine's cores (at most "
            f"{MOST_FOR_OTHERS:.0%} may be): figures would be theirs, so none is kept. Wait until "
            "they have ended; --loaded looks at figures all the same"
        )


def measured_alone(
    work: Callable[[], object], root: int, look_seconds: float = _LOOK_SECONDS
) -> Surroundings:
    """Do ``work`` and say what else the machine did meanwhile.

    Args:
        work: what is measured.
        root: of the tree of processes that belong to it.
        look_seconds: how long to look at the machine before it begins.

    Raises:
        Loaded: before anything is done, if others use the machine already.
    """
    looked = Usage.now(root)
    time.sleep(look_seconds)
    before, load_before = Usage.now(root), os.getloadavg()[0]
    if (others := share_of_others(looked, before)) > MOST_FOR_OTHERS:
        raise Loaded(others, "use")
    work()
    after = Usage.now(root)
    return Surroundings(
        load_before,
        os.getloadavg()[0],
        share_of_others(before, after),
        (after.clock - before.clock) / 60,
    )


class _Both(io.TextIOBase):
    """Standard output, and what went through it."""

    def __init__(self) -> None:
        self._stream, self._lines = sys.stdout, io.StringIO()

    def write(self, text: str) -> int:
        self._lines.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    @property
    def text(self) -> str:
        return self._lines.getvalue().strip("\n")


def publish(main: Callable[[], object]) -> None:
    """Run a benchmark's ``main`` on a machine of its own, and keep its figures if that is asked.

    Processes that a benchmark starts, and all ranks but the first under torchrun, only run
    ``main``. What ``main`` returns other than ``None`` is the exit status.

    Raises:
        Loaded: others used the machine, before or meanwhile.
    """
    keep, loaded, sys.argv[1:] = _options(sys.argv[1:])
    if loaded and keep is not None:
        sys.exit("--loaded keeps no figures: leave out --keep, or --loaded")
    within = os.environ.setdefault(_WITHIN, str(os.getpid())) != str(os.getpid())
    asks = bool({"-h", "--help"} & set(sys.argv[1:]))
    if loaded or within or asks or os.environ.get("RANK", "0") != "0":
        sys.exit(main())
    module = sys.modules["__main__"].__spec__
    name = "benchmark"
    if module:
        name = module.name.removeprefix("benchmarks.").removesuffix(".__main__")
    root = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    ranks = os.environ.get("WORLD_SIZE")
    runner = ["python"] if ranks is None else ["torchrun", f"--nproc-per-node={ranks}"]
    command = shlex.join([*runner, "-m", f"benchmarks.{name}", *sys.argv[1:]])
    both, statuses = _Both(), []
    with redirect_stdout(both):
        surroundings = measured_alone(lambda: statuses.append(main()), root)
    print(f"\n{surroundings}")
    if not surroundings.alone:
        raise Loaded(surroundings.others, "used")
    if keep is not None and not statuses[0]:
        store(keep or name, command, both.text, surroundings)
    sys.exit(statuses[0])


def store(name: str, command: str, output: str, surroundings: Surroundings) -> Path:
    """Keep what a command printed in ``benchmarks/results``, with where it was.

    ``python -m benchmarks.common.page`` writes ``docs/benchmarks.md`` from these files.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.txt"
    path.write_text(f"$ {command}\n{surroundings}\n\n{output}\n", encoding="utf-8")
    print(f"kept in {path}")
    return path


def _options(words: Sequence[str]) -> tuple[str | None, bool, list[str]]:
    """The name to keep figures under (empty: the benchmark's), whether others may be there, and
    the other words."""
    keep, loaded, rest = None, False, []
    for word in words:
        if word == "--loaded":
            loaded = True
        elif word == "--keep" or word.startswith("--keep="):
            keep = word.removeprefix("--keep").removeprefix("=")
        else:
            rest.append(word)
    return keep, loaded, rest


def _command() -> int:
    """Run the command behind ``--``, and print what it prints."""
    words = sys.argv[1:]
    if not words or words[0] != "--" or not words[1:]:
        sys.exit("usage: python -m benchmarks.common.alone [--keep=NAME] [--loaded] -- COMMAND …")
    with subprocess.Popen(words[1:], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
    return process.returncode


if __name__ == "__main__":
    publish(_command)
