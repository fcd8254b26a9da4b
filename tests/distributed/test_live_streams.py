"""Live streams over several processes equal the recurrence, and nobody hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.examples import more
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "live_streams.py"


@pytest.mark.parametrize(
    ("num_ranks", "transport"),
    [
        more(3, "shared-memory"),
        more(2, "process-group"),
        (2, "shared-memory"),
        more(4, "shared-memory"),
        more(3, "process-group"),
    ],
)
def test_processes_learn_as_the_recurrence_says(num_ranks, transport):
    job = forked(JOB, num_ranks, "all", transport)
    assert job.returncode == 0, job.output
    assert {rank: report["differences"] for rank, report in job.reports.items()} == {
        rank: [] for rank in range(num_ranks)
    }


@pytest.mark.parametrize("transport", ["shared-memory", more("process-group")])
def test_a_rank_that_dies_is_missed_at_once(transport):
    job = forked(JOB, 3, "killed", transport)
    assert {rank: report["told"] for rank, report in job.reports.items()} == {
        0: "PeerError",
        2: "PeerError",
    }
