"""Meshes whose members are processes train what one device trains."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from tests.kit.examples import more
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "meshes.py"
FAULT = JOB.with_name("mesh_fault.py")


@pytest.mark.parametrize(
    ("schedule", "sizes", "transport"),
    [
        ("1f1b", "2x1x2", "shared-memory"),
        more("zb-h1", "1x1x2", "process-group"),
        more("1f1b", "2x2x2", "shared-memory"),
        more("1f1b", "2x2x2", "process-group"),
        more("interleaved-1f1b", "2x1x2", "process-group"),
        more("1f1b", "2,1", "shared-memory"),
        more("1f1b", "1,2", "process-group"),
        more("1f1b", "2,3", "shared-memory"),
    ],
)
def test_a_mesh_of_processes_trains_as_one_device(schedule, sizes, transport):
    num_processes = (
        sum(map(int, sizes.split(","))) if "," in sizes else prod(map(int, sizes.split("x")))
    )
    job = forked(JOB, num_processes, schedule, sizes, transport)
    assert job.returncode == 0, job.output
    assert {number: report["differences"] for number, report in job.reports.items()} == {
        number: [] for number in range(num_processes)
    }


@pytest.mark.parametrize("transport", ["shared-memory", more("process-group")])
def test_when_a_member_is_killed_the_others_hear_of_it(transport):
    job = forked(FAULT, 4, transport)
    assert set(job.reports) == {0, 1, 2}, job.output
    for report in job.reports.values():
        assert "rank 3" in report["told"], report
        assert report["seconds"] < 50  # long before the deadline
