"""Copies of stages that divide experts train as one device does, and each holds its share."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.kit.examples import more
from tests.kit.launch import forked
from tests.kit.paths import ROOT
from tests.kit.training import DEADLINE_SECONDS

JOB = Path(__file__).parent / "jobs" / "experts.py"


@pytest.mark.parametrize(
    "case",
    [
        "own",
        "split",
        "checkpoint",
        "held",
        "refusals",
        more("other ways"),
        more("own in every way"),
    ],
)
def test_divided_experts_train_as_whole_ones(case):
    job = forked(JOB, 4, case)
    assert job.reports == {rank: [] for rank in range(4)}, job.output


@pytest.mark.soak
def test_mixtures_of_transformers_are_divided():
    job = forked(JOB, 2, "transformers")
    assert job.reports == {0: [], 1: []}, job.output


@pytest.mark.parametrize("victim", [2, more(3)])
def test_a_rank_that_is_killed_while_tokens_travel_is_missed_by_name(victim):
    job = forked(JOB, 4, f"{victim} dies")
    assert set(job.reports) == {0, 1, 2, 3} - {victim}, job.output
    for kind, text, seconds in job.reports.values():
        assert kind == "PeerError" and f"rank {victim} is gone" in text, text
        assert seconds < DEADLINE_SECONDS / 2, text


def test_the_example_learns_the_same_with_and_without_expert_ranks():
    script = ROOT / "examples" / "mixture_of_experts.py"
    job = forked(script, 4, "--steps", "2", "--width", "16", reports=False)
    lines = [line for line in job.output.splitlines() if line.startswith("expert_ranks=")]
    losses = [json.loads(re.search(r"\[.*?\]", line)[0]) for line in lines]
    assert len(lines) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-5), job.output
    assert "2.experts: " in job.output and job.returncode == 0
