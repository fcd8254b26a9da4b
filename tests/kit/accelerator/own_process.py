"""Runs tests of the emulated accelerator in a process of their own; a plugin of pytest.

A process cannot take up an accelerator late, nor put it down. Torch's autograd starts one thread
for each device at the first backward of the process, whichever device that is on, and none later:
an accelerator that comes after it fails in its first backward. And once it is there, torch tells
everybody who asks that this machine has one. Hence all tests that use the fixture ``accelerator``
are run together by a second pytest, and its reports become those of the first.

``PENSTOCK_ACCELERATOR=here pytest FILE`` runs them in this process, as debuggers want it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

from tests.kit.accelerator import building

VARIABLE = "PENSTOCK_ACCELERATOR"  # a file for reports, or "here"
_NODE_ID = pytest.StashKey[str]()
_REPORTS = pytest.StashKey[dict[str, list[dict]]]()

_MEMORY_BYTES = 16 << 30  # of each device, unless a test gives it less
_PATIENCE_SECONDS = 1200  # for the first test: it waits for all others, maybe for a build


@pytest.fixture
def accelerator() -> ModuleType:
    """The module of the four devices, at rest; afterwards, all copies must have been right."""
    if VARIABLE not in os.environ:  # it would come too late, and stay
        pytest.fail("name the fixture among the test's arguments, or by `usefixtures`")
    from tests.kit.accelerator.devices import register

    module = register()
    _put_to_rest(module)
    yield module
    try:
        module.check()
    finally:
        _put_to_rest(module)


def _put_to_rest(module: ModuleType) -> None:
    module.set_sync_debug_mode("default")
    for index in reversed(range(module.device_count())):
        module.set_device(index)
        with contextlib.suppress(RuntimeError):  # what a test did wrong is told once
            module.synchronize(index)
        module.set_stream(module.default_stream(index))
        module.set_memory_limit(_MEMORY_BYTES, index)
        module.reset_host_counts(index)
        module.reset_peak_memory_stats(index)


def pytest_sessionstart() -> None:
    """In the second process: takes up the accelerator before anything can run a backward."""
    if VARIABLE in os.environ:
        from tests.kit.accelerator.devices import register

        register()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests of one process together under xdist; skips them where no devices can be."""
    concerned = [item for item in items if _uses_accelerator(item)]
    missing = building.why_not() if concerned else None
    for item in concerned:
        item.stash[_NODE_ID] = item.nodeid  # xdist adds the group to it
        item.add_marker(pytest.mark.xdist_group("accelerator"))
        if VARIABLE not in os.environ:
            item.add_marker(pytest.mark.timeout(_PATIENCE_SECONDS))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Gives what the other process reported, which runs at the first such test."""
    is_skipped = item.get_closest_marker("skip") is not None
    if not _uses_accelerator(item) or VARIABLE in os.environ or is_skipped:
        return None
    stash = item.session.stash
    if _REPORTS not in stash:
        together = [other for other in item.session.items if _uses_accelerator(other)]
        stash[_REPORTS] = _reports_of_another_process(together)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in stash[_REPORTS][item.stash[_NODE_ID]]:
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        report.nodeid = item.nodeid
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What an earlier test of this module had set up for it, the next one may not need.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the second process: tells the first."""
    file = os.environ.get(VARIABLE, "here")
    if file != "here":
        with open(file, "a") as reports:
            reports.write(json.dumps(_as_data(report), default=str) + "\n")


def _uses_accelerator(item: pytest.Item) -> bool:
    return "accelerator" in getattr(item, "fixturenames", ())


def _reports_of_another_process(items: list[pytest.Item]) -> dict[str, list[dict]]:
    """Runs tests in a second pytest; gives the reports of each."""
    root = items[0].config.rootpath
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "reports")
        options = ["-q", "-m", "", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(root)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *(item.stash[_NODE_ID] for item in items)],
            cwd=root,
            env={**os.environ, VARIABLE: str(file)},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = file.read_text().splitlines() if file.exists() else []
    reports = defaultdict(list)
    for data in map(json.loads, lines):
        reports[data["nodeid"]].append(data)
    unfinished = [
        item
        for item in items
        if not any(data["when"] == "teardown" for data in reports[item.stash[_NODE_ID]])
    ]
    for item in unfinished:
        text = f"The accelerator's process ended with code {done.returncode} before this test did."
        if item is unfinished[0]:
            text += f"\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        reports[item.stash[_NODE_ID]].append(_as_data(report))
    return reports


def _as_data(report: pytest.TestReport) -> dict:
    return report._to_json() | {"$report_type": "TestReport"}
