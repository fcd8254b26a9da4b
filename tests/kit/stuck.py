"""Ends a process whose test is stuck where its timeout cannot end it; a plugin of pytest.

pytest-timeout raises an exception in the main thread, once. One that waits in C does not see it,
and one that waits for the same thing again on its way out (a pipeline that is closed waits for its
ranks) is stuck for good, and the run with it. A while later the process says where all of its
threads are and ends; pytest-xdist reports the test as failed and ends the run, as it is told
(`--max-worker-restart=0`): with groups, it waits for ever once it has replaced a worker late.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from typing import TextIO

import pytest

from tests.kit.accelerator.own_process import VARIABLE

_GRACE_SECONDS = 60  # for what the test does on its way out
_STDERR = pytest.StashKey[TextIO]()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the way to the terminal, which tests are cut off from."""
    config.stash[_STDERR] = os.fdopen(os.dup(2), "w")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Gives a test its time, and nobody a surprise who has a debugger open."""
    is_workers = hasattr(item.config, "workerinput") or os.environ.get(VARIABLE, "here") != "here"
    if not is_workers:
        return (yield)
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(
        seconds + _GRACE_SECONDS, exit=True, file=item.config.stash[_STDERR]
    )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
