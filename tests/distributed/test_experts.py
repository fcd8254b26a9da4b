"""Copies of stages that divide experts train as one device does, and each holds its share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "experts.py"


@pytest.mark.parametrize("case", ["own", "split", "checkpoint", "held", "refusals"])
def test_divided_experts_train_as_whole_ones(case):
    job = forked(JOB, 4, case)
    assert job.reports == {rank: [] for rank in range(4)}, job.output


def test_mixtures_of_transformers_are_divided():
    job = forked(JOB, 2, "transformers")
    assert job.reports == {0: [], 1: []}, job.output


@pytest.mark.parametrize("victim", [2, 3])
def test_a_rank_that_is_killed_while_tokens_travel_is_missed_by_name(victim):
    job = forked(JOB, 4, f"{victim} dies")
    assert set(job.reports) == {0, 1, 2, 3} - {victim}, job.output
    for kind, text, seconds in job.reports.values():
        assert kind == "PeerError" and f"rank {victim} is gone" in text, text
        assert seconds < 20, text
