"""One logical model over several processes: against plain torch, over both transports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.examples import more
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "logical_model.py"


@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
@pytest.mark.parametrize("num_ranks", [2, more(4)])
@pytest.mark.parametrize("what", ["families", "features"])
def test_a_job_of_several_processes_trains_as_one_device(what, num_ranks, transport):
    job = forked(JOB, num_ranks, what, transport)
    assert job.returncode == 0, job.output
    assert {rank: report["differences"] for rank, report in job.reports.items()} == {
        rank: [] for rank in range(num_ranks)
    }
