"""Copies of stages that have rows of the weights train as one device does, and hold their share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.examples import more
from tests.kit.launch import forked
from tests.kit.training import DEADLINE_SECONDS

JOB = Path(__file__).parent / "jobs" / "fully_sharded.py"


CASES = (
    "one device", more("one device in every way"), more("owners"), "checkpoint", "held",
    more("counted"), "split", "other ways", "refusals", "anew",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rows_of_weights_train_as_whole_ones(case):
    job = forked(JOB, 4, case)
    assert job.reports == {rank: [] for rank in range(4)}, job.output


@pytest.mark.parametrize(("victim", "replicas"), [more(0, "2-2"), (1, "2-2"), (2, "4")])
def test_a_rank_that_is_killed_is_missed_by_name(victim, replicas):
    before = {*Path("/dev/shm").iterdir()}
    job = forked(JOB, 4, f"{victim} dies {replicas}")
    assert set(job.reports) == {0, 1, 2, 3} - {victim}, job.output
    for kind, text, seconds in job.reports.values():
        assert kind == "PeerError" and f"rank {victim} is gone" in text, text
        assert seconds < DEADLINE_SECONDS / 2, text
    assert not [path for path in {*Path("/dev/shm").iterdir()} - before if "penstock" in path.name]


def test_a_layer_that_raises_ends_all_copies_at_once():
    job = forked(JOB, 4, "1 raises 4")
    assert set(job.reports) == {0, 1, 2, 3}, job.output
    assert job.reports.pop(1)[0] == "StageError"
    for kind, text, seconds in job.reports.values():
        assert kind == "PeerError" and "cancelled because rank 1 failed" in text, text
        assert "a layer that raises" in text and seconds < DEADLINE_SECONDS / 2, text
