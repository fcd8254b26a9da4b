"""Pipelines side by side train as one device does, whoever sums their gradients."""

from __future__ import annotations

from pathlib import Path

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "side_by_side.py"


def test_two_pipelines_of_two_ranks_with_several_stages_train_as_one_device():
    job = forked(JOB, 4)
    assert job.reports == {rank: [] for rank in range(4)}, job.output
