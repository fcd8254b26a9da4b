"""Changes the source at random places, and tells which changes no test of their room notices.

    python -m tests.soak.mutations --count 50 --seed 7

Everything happens in a copy. A change is tried on the doctests of its file, on the tests that
mirror the file, and on the unit tests of its room; one that survives these, on tests of the whole
that belong to the room. What is equivalent is listed in ``equivalent_mutations.toml``, with the
reason.
"""

from __future__ import annotations

import argparse
import compileall
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NamedTuple

from tests.kit.mutating import Mutation, mutations_of

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src", "penstock")
EQUIVALENT = Path(__file__).with_name("equivalent_mutations.toml")

ROOMS = {
    "core/schedule": (
        "tests/unit/schedule",
        ["tests/golden/test_golden_numbers.py", "tests/laws/test_schedule_laws.py"],
    ),
    "engine/reduce": (
        "tests/unit/reduce",
        ["tests/numerics/test_stale_updates.py", "tests/distributed/test_reducers.py"],
    ),
    "engine/run/rank": (
        "tests/unit/run",
        ["tests/numerics/test_same_as_one_device.py", "tests/numerics/test_asynchronous.py"],
    ),
    "training/checkpoint": (
        "tests/unit/checkpoint",
        ["tests/laws/test_checkpoint_laws.py", "tests/numerics/test_checkpoints.py"],
    ),
    "planning/planner": ("tests/unit/planner", ["tests/laws/test_planner_laws.py"]),
}
"""Of each room, its unit tests, and tests of the whole that are about it."""

_MOST_WHOLE_SECONDS = 3600
SECONDS_PER_TEST = 120
SECONDS_PER_RUN = 300
"""A change may let something wait or loop for ever; others need far less, also on a loaded host.
What loops outside of Python is not ended by a test's own limit."""
_SETTINGS = {"OMP_NUM_THREADS": "1", "COLUMNS": "500"}
"""In few columns pytest would not say why a test has failed."""
_MISUSED, _NO_TESTS = 4, 5
"""What pytest ends with if it is called wrongly, or finds nothing to do."""


class Place(NamedTuple):
    """A mutation and where it is."""

    room: str
    file: str
    mutation: Mutation

    @property
    def key(self) -> tuple[str, str, str]:
        """What stays the same when lines move."""
        return self.file, self.mutation.scope, self.mutation.change

    def __str__(self) -> str:
        one = self.mutation
        return f"{self.file}:{one.line}  {one.scope or '(module)'}  {one.change}"


class Outcome(NamedTuple):
    """What became of a mutation: ``"test"``, ``"timeout"``, ``"whole"`` (caught, but not by the
    room's own tests), ``"survived"`` or ``"equivalent"``; and which test caught it."""

    verdict: str
    by: str = ""


@cache
def places(room: str) -> tuple[Place, ...]:
    """All mutations of a room."""
    return tuple(
        Place(room, str(path.relative_to(ROOT / PACKAGE)), mutation)
        for path in sorted((ROOT / PACKAGE / room).rglob("*.py"))
        for mutation in mutations_of(path.read_text())
    )


def drawn(seed: int, count: int, rooms: Sequence[str]) -> list[Place]:
    """As many mutations of each room, a new place each time."""
    shuffled = {room: [*places(room)] for room in rooms}
    for room, own in shuffled.items():
        random.Random(f"{seed} {room}").shuffle(own)
    return [shuffled[rooms[index % len(rooms)]][index // len(rooms)] for index in range(count)]


def equivalents(text: str) -> dict[tuple[str, str, str], str]:
    """Reasons why mutations change nothing, by their keys."""
    entries = tomllib.loads(text).get("mutation", [])
    return {(one["file"], one["scope"], one["change"]): one["reason"] for one in entries}


class Copy:
    """A copy of the project in which one file at a time is changed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        for path in ROOT.iterdir():
            if path.name.startswith(".") or path.name in ("build", "dist"):
                continue
            if path.is_dir():
                skipped = shutil.ignore_patterns("__pycache__", ".*")
                shutil.copytree(path, folder / path.name, ignore=skipped)
            else:
                shutil.copy(path, folder)
        # Two changes of one file within a second may be of the same size: compiled code must be
        # compared with its source itself.
        mode = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "src", quiet=1, invalidation_mode=mode)

    @contextmanager
    def mutated(self, place: Place) -> Iterator[None]:
        """A context with one mutation."""
        path = self._folder / PACKAGE / place.file
        before = path.read_text()
        path.write_text(place.mutation.applied(before))
        try:
            yield
        finally:
            path.write_text(before)

    def own_tests(self, place: Place) -> list[str]:
        """The doctests of a file, the tests that mirror it, and those of its room."""
        unit, _ = ROOMS[place.room]
        mirrored = sorted((self._folder / unit).rglob(f"test_{Path(place.file).stem}.py"))
        named = [str(path.relative_to(self._folder)) for path in mirrored]
        return [str(PACKAGE / place.file), *named, unit]

    def tried(self, tests: Sequence[str], seconds: float = SECONDS_PER_RUN) -> Outcome:
        """What some tests say, until the first that fails.

        Args:
            seconds: how long all of them may take.

        Raises:
            RuntimeError: they cannot be run.
        """
        command = [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"),
            *(f"--timeout={SECONDS_PER_TEST}", f"--hypothesis-seed={self._seed}", *tests),
        ]
        pythonpath = str(self._folder / "src")
        started = subprocess.Popen(
            command, cwd=self._folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": pythonpath, **_SETTINGS},
            start_new_session=True,
        )  # fmt: skip
        with started as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                return Outcome("timeout")
            finally:
                _end(process)
        if process.returncode == 0:
            return Outcome("survived")
        misused = process.returncode == _MISUSED and "while loading conftest" not in output
        if misused or process.returncode == _NO_TESTS:
            raise RuntimeError(f"pytest ended with {process.returncode}:\n{output}")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        by = failed[1] if failed is not None else ""
        return Outcome("timeout" if "Timeout (>" in output or "Timeout >" in output else "test", by)


def _end(process: subprocess.Popen[str]) -> None:
    """End a run and whatever it has started."""
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)


def outcome_of(copy: Copy, place: Place, seconds: float, *, whole: bool) -> Outcome:
    """What tests say of a mutation.

    Args:
        seconds: how long those of its room may take.
        whole: whether tests of the whole are asked, too.
    """
    with copy.mutated(place):
        outcome = copy.tried(copy.own_tests(place), seconds)
        if outcome.verdict != "survived" or not whole:
            return outcome
        by_whole = copy.tried(ROOMS[place.room][1], _MOST_WHOLE_SECONDS)
        return outcome if by_whole.verdict == "survived" else Outcome("whole", by_whole.by)


def _plain_seconds(copy: Copy, room: str) -> float:
    """How long the tests of a room take without any mutation.

    Raises:
        RuntimeError: they fail.
    """
    begun = time.monotonic()
    plain = copy.tried([ROOMS[room][0]], _MOST_WHOLE_SECONDS)
    if plain.verdict != "survived":
        raise RuntimeError(f"without any mutation: {plain.by} ({plain.verdict})")
    return time.monotonic() - begun


def run(
    seed: int, count: int, rooms: Sequence[str], among: str = "", *, whole: bool = True
) -> list[tuple[Place, Outcome]]:
    """Try mutations, and print each as it has been tried.

    Args:
        among: a text; only those of the drawn places are tried in which it stands.
        whole: whether what survives is tried on tests of the whole.

    Raises:
        RuntimeError: tests fail without any mutation, or cannot be run.
    """
    known = equivalents(EQUIVALENT.read_text())
    chosen = [place for place in drawn(seed, count, rooms) if among in str(place)]
    print(f"seed {seed}: {len(chosen)} mutations", flush=True)
    told: list[tuple[Place, Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Copy(Path(folder), seed)
        limits = {
            room: SECONDS_PER_RUN + 5 * _plain_seconds(copy, room)
            for room in {place.room: None for place in chosen}
        }
        for place in chosen:
            begun = time.monotonic()
            if place.key in known:
                outcome = Outcome("equivalent")
            else:
                outcome = outcome_of(copy, place, limits[place.room], whole=whole)
            told.append((place, outcome))
            seconds = f"{time.monotonic() - begun:.0f} s"
            print(f"{outcome.verdict:<10} {place}  [{outcome.by}] {seconds}", flush=True)
    counts = Counter(outcome.verdict for _, outcome in told)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()))
    return told


def main() -> int:
    """The command; 1 if too little was caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="drawn and printed if not given")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--room", action="append", choices=ROOMS, help="may be repeated")
    parser.add_argument("--among", default="", help="only drawn places with this text in them")
    parser.add_argument(
        "--room-only", action="store_true", help="don't try survivors on tests of the whole"
    )
    parser.add_argument(
        "--least", type=float, default=0.75, metavar="SHARE", help="of what must be caught"
    )
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    told = run(seed, given.count, given.room or [*ROOMS], given.among, whole=not given.room_only)
    survived = sum(outcome.verdict == "survived" for _, outcome in told)
    return int(survived > (1 - given.least) * len(told))


if __name__ == "__main__":
    sys.exit(main())
