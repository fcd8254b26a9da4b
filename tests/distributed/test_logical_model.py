"""One logical model over several processes: against plain torch, over both transports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.examples import more
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "logical_model.py"


@pytest.mark.parametrize(
    ("what", "num_ranks", "transport"),
    [
        more("families", 2, "shared-memory"),
        ("features", 2, "shared-memory"),
        more("features", 2, "process-group"),
        # As every family of an MLP; see test_process_group.
        more("families", 2, "process-group"),
        *(more("families", 4, transport) for transport in ("shared-memory", "process-group")),
        *(more("features", 4, transport) for transport in ("shared-memory", "process-group")),
    ],
)
def test_a_job_of_several_processes_trains_as_one_device(what, num_ranks, transport):
    job = forked(JOB, num_ranks, what, transport)
    assert job.returncode == 0, job.output
    assert {rank: report["differences"] for rank, report in job.reports.items()} == {
        rank: [] for rank in range(num_ranks)
    }
