"""Long runs hold what they held at first, and are as fast at the end as in the beginning."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from tests.kit.launch import torchrun

JOB = Path(__file__).parent / "jobs" / "long_run.py"
MOST_GROWTH_BYTES = 16 * 2**20
MOST_SEGMENTS = 48
"""Shared memory of messages under way at once, in both directions, with the rings. How many that
were depends on which rank the machine let run, so the most of a run comes late now and then; but
all frames and microbatches that may be under way need fewer."""
MOST_SLOWDOWN = 2.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("way", "count"), [("steps", 2_000), ("stream", 20_000), ("live", 100_000)]
)
def test_a_long_run_leaks_nothing_and_does_not_slow_down(way, count):
    job = torchrun(JOB, 2, way, str(count), limit_seconds=1100)
    assert set(job.reports) == {0, 1}, job.output
    for rank, report in job.reports.items():
        looks = report["looks"]
        early, late = looks[len(looks) // 4], looks[-1]
        told = f"rank {rank}: {early} … {late}"
        assert late["descriptors"] == early["descriptors"], told
        assert late["segments"] <= MOST_SEGMENTS, told
        assert late["threads"] == early["threads"], told
        assert late["resident_bytes"] - early["resident_bytes"] < MOST_GROWTH_BYTES, told
        paces = [after["seconds"] - before["seconds"] for before, after in pairwise(looks[:-1])]
        quarter = len(paces) // 4
        # Other load comes and goes; a run that slows down keeps doing so.
        assert median(paces[-quarter:]) < MOST_SLOWDOWN * median(paces[:quarter]) + 0.5, told
