"""Ranks that are given different minibatches, or call different methods, are told at once."""

from __future__ import annotations

import re
from pathlib import Path

from tests.distributed.jobs.alike import CASES
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "alike.py"
LATER = {
    "in a loop",
    "in a stream",
    "in a stream of rounds",
    "in a stream with replicas",
    "gathers later",
}
"""Cases in which ranks first have trained on the same data."""


def test_every_rank_is_told_and_nothing_is_trained():
    job = forked(JOB, 3, "shared-memory")
    assert set(job.reports) == {0, 1, 2}, job.output
    for rank, report in job.reports.items():
        assert report.pop("differences") == []
        assert [*report] == [*CASES]
        for name, outcome in report.items():
            where = f"rank {rank}, {name}: {outcome}"
            assert re.search(CASES[name].told, outcome["told"]), where
            assert "did not answer" not in outcome["told"], where
            later = name in LATER or name.startswith("fewer")
            assert later or not outcome["moved"], where
