"""The benchmark's hand-written contestants do the same work as everybody else."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contest.runtime import BY_HAND, yardstick
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "handwritten.py"


def test_hand_written_contestants_equal_one_process():
    job = forked(JOB, 2, "2,3,4")
    assert job.returncode == 0, job.output
    assert set(job.reports) == {0, 1}
    for rank, report in job.reports.items():
        assert report["exact"] == {
            f"{yardstick(kind, name)}, m = {count}": count != 3
            for count in (2, 3, 4)
            for kind in (["threads"] if rank == 0 else []) + ["processes"]
            for name in BY_HAND
        }
        assert not report["left"], f"rank {rank} has not given back the memory it shared"
