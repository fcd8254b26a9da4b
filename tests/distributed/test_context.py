"""Processes that share the positions of a sequence train what one device trains."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from tests.kit.examples import more
from tests.kit.launch import forked
from tests.kit.training import DEADLINE_SECONDS

JOB = Path(__file__).parent / "jobs" / "context.py"


@pytest.mark.parametrize(
    ("schedule", "sizes", "transport"),
    [
        ("1f1b", "1x1x2", "process-group"),
        ("1f1b", "2x1x2", "shared-memory"),
        more("zb-h1", "2x1x2", "process-group"),
        more("gpipe", "1x2x2", "shared-memory"),
    ],
)
def test_a_sequence_shared_by_processes_trains_as_one_device(schedule, sizes, transport):
    job = forked(JOB, prod(map(int, sizes.split("x"))), schedule, sizes, transport)
    count = prod(map(int, sizes.split("x")))
    assert job.reports == {number: [] for number in range(count)}, job.output


@pytest.mark.parametrize("transport", ["shared-memory", more("process-group")])
def test_a_killed_context_rank_is_named_by_all(transport):
    before = {*Path("/dev/shm").iterdir()}
    job = forked(JOB, 4, "killed", "2x1x2", transport)
    assert set(job.reports) == {0, 1, 2}, job.output
    for report in job.reports.values():
        assert "rank 3" in report["told"], report
        assert report["seconds"] < DEADLINE_SECONDS / 2
    assert not [path for path in {*Path("/dev/shm").iterdir()} - before if "penstock" in path.name]
