"""Asynchronous pipelines over several processes equal the sequential replay of their delays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.examples import more
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "asynchronous.py"


@pytest.mark.parametrize(
    ("num_ranks", "transport", "what"),
    [
        (2, "shared-memory", "all"),
        more(3, "shared-memory", "replicas"),
        more(3, "process-group", "some"),
        more(2, "process-group", "all"),
        more(3, "shared-memory", "all"),
        more(3, "process-group", "all"),
        more(4, "shared-memory", "all"),
        more(4, "process-group", "all"),
    ],
)
def test_processes_train_as_the_replay_says(num_ranks, transport, what):
    job = forked(JOB, num_ranks, transport, what)
    assert job.returncode == 0, job.output
    assert {rank: report["differences"] for rank, report in job.reports.items()} == {
        rank: [] for rank in range(num_ranks)
    }
