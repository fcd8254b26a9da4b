"""Jobs of two processes, each with an accelerator of its own, which are emulated ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.accelerator import building
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "devices.py"

pytestmark = pytest.mark.skipif(bool(building.why_not()), reason=building.why_not() or "")


@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_processes_train_on_their_own_devices_as_threads_on_the_cpu(transport):
    done = forked(JOB, 2, transport)
    assert done.returncode == 0, done.output
    assert done.reports == {0: [], 1: []}
