"""Copies of stages that divide experts train as one device does, and each holds its share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "experts.py"
CASES = ("own", "transformers")


@pytest.mark.parametrize("case", CASES)
def test_divided_experts_train_as_whole_ones(case):
    job = forked(JOB, 4, case)
    assert job.reports == {rank: [] for rank in range(4)}, job.output
