"""Masters, sums in float32 and memory as planned, of copies of stages in processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.examples import more
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "half_precision.py"


@pytest.mark.parametrize("case", ["by hand", "checkpoint", "memory", more("all memory")])
def test_half_precision_in_processes(case):
    job = forked(JOB, 4, case)
    assert job.reports == {rank: [] for rank in range(4)}, job.output
