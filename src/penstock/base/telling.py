"""Lines that people read, while they wait and afterwards.

What takes long says so: a line on standard error every few seconds, with or without a terminal.
Nothing is said of what is done within two seconds, nor where ``PENSTOCK_QUIET`` is set in the
environment, nor by other ranks than the first of a job. Prose is wrapped to the window.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from textwrap import fill
from typing import ParamSpec, Self, TypeVar

from penstock.base.errors import printable

WARNING = "! "
"""Stands before what is doubtful."""


def wrap_to(text: str, width: int, beside: str = "") -> str:
    """A sentence in lines of at most so many columns; a longer word, as a path, stays whole.

    Args:
        beside: what stands before the first line, under which the others are indented.

    >>> print(wrap_to("ranks wait for each other", 16, "! "))
    ! ranks wait for
      each other
    """
    return fill(
        printable(text),  # before a control character passes for a space
        width,
        initial_indent=beside,
        subsequent_indent=" " * len(beside),
        break_long_words=False,
        break_on_hyphens=False,
    )


P = ParamSpec("P")
R = TypeVar("R")

FIRST_SECONDS = 2.0
"""After so long the first line comes."""

EVERY_SECONDS = 5.0
"""After so long the next one."""


class Telling:
    """A context in which something takes long.

    Args:
        activity: what is being done, as ``"profiling"``.
        quiet: say nothing all the same: somebody else does.
    """

    def __init__(self, activity: str, *, quiet: bool = False) -> None:
        self._activity = activity
        self._quiet = quiet or is_quiet()
        self._how_far = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = time.monotonic()

    def update(self, how_far: str) -> None:
        """Let the next line say this beside the time, for example ``"3 of 7"``."""
        self._how_far = how_far

    def count(self, done: int, total: int) -> None:
        """As ``update``, for what is counted."""
        self._how_far = f"{done} of {total}"

    def __enter__(self) -> Self:
        if not self._quiet:
            self._thread = threading.Thread(
                target=self._run, name=f"penstock tells of {self._activity}", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        seconds = FIRST_SECONDS
        while not self._ended.wait(seconds):
            seconds = EVERY_SECONDS
            elapsed = f"{time.monotonic() - self._started:.0f} s"
            line = ", ".join(filter(None, (self._how_far, elapsed)))
            with suppress(ValueError, OSError, AttributeError):  # nobody listens any more
                print(f"penstock: {self._activity} … {line}", file=sys.stderr, flush=True)  # noqa: T201


def tells(activity: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that says so while it runs long; ``activity`` is what is being done."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def telling(*args: P.args, **kwargs: P.kwargs) -> R:
            with Telling(activity):
                return function(*args, **kwargs)

        return telling

    return decorate


def tell(line: str) -> None:
    """Say something once on standard error, unless this process is quiet."""
    if not is_quiet():
        with suppress(ValueError, OSError, AttributeError):  # nobody listens any more
            print(f"penstock: {line}", file=sys.stderr, flush=True)  # noqa: T201


def is_quiet() -> bool:
    """Whether this process says nothing of how far it is."""
    return bool(os.environ.get("PENSTOCK_QUIET")) or os.environ.get("RANK", "0") != "0"
