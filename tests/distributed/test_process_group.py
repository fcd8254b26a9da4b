"""Real jobs of several processes, some under torchrun, over the process group and shared memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.jobs.failure import LONG_SECONDS
from tests.kit.examples import more
from tests.kit.launch import forked, torchrun

JOBS = Path(__file__).parent / "jobs"


TRANSPORTS = ["process-group", "shared-memory"]


def failing_job(how, victim, transport, launch=forked):
    return launch(JOBS / "failure.py", 3, how, str(victim), transport)


@pytest.mark.parametrize(
    ("num_ranks", "launch", "transport", "counts"),
    [
        # Messages and what launches have no part in the order of ops: each meets some counts.
        (1, forked, "process-group", "1,2,5"),
        more(2, torchrun, "process-group", "2"),
        more(3, forked, "process-group", "5"),
        (3, forked, "shared-memory", "2"),
        more(3, forked, "shared-memory", "1"),
        more(1, forked, "shared-memory", "1,2,5"),
        more(2, torchrun, "process-group", "1,5"),
        more(2, torchrun, "shared-memory", "1,2,5"),
        more(3, forked, "process-group", "1,2"),
        more(3, forked, "shared-memory", "5"),
        *(more(4, forked, transport, "1,2,5") for transport in TRANSPORTS),
    ],
)
def test_training_equals_one_device_to_the_bit(num_ranks, launch, transport, counts):
    job = launch(JOBS / "equality.py", num_ranks, transport, counts)
    assert job.returncode == 0, job.output
    assert {rank: report["differences"] for rank, report in job.reports.items()} == {
        rank: [] for rank in range(num_ranks)
    }


@pytest.mark.parametrize("num_ranks", [more(2), 3])
def test_gradients_equal_those_of_torch_pipelining(num_ranks):
    job = forked(JOBS / "oracle.py", num_ranks)
    assert job.returncode == 0, job.output
    assert {rank: report["differences"] for rank, report in job.reports.items()} == {
        rank: [] for rank in range(num_ranks)
    }


@pytest.mark.soak
def test_torchs_own_runtime_trains_by_our_schedules():
    job = forked(JOBS / "torch_runtime.py", 2)
    assert job.reports == {0: [], 1: []}, job.output


@pytest.mark.parametrize(
    ("victim", "launch", "transport"),
    [
        # Other victims of each are in test_faults.py.
        (0, forked, "shared-memory"),
        (2, forked, "process-group"),
        more(0, forked, "process-group"),
        more(2, forked, "shared-memory"),
        more(1, torchrun, "process-group"),
        more(1, torchrun, "shared-memory"),
    ],
)
def test_a_killed_rank_ends_all_others_with_its_name(victim, launch, transport):
    job = failing_job("kill", victim, transport, launch)
    assert set(job.reports) == {0, 1, 2} - {victim}, job.output
    for rank, report in job.reports.items():
        assert report["kind"] == "PeerError"
        assert report["seconds"] < LONG_SECONDS / 2
        assert f"rank {victim} is gone" in report["message"]
        names_the_op = re.match(rf"rank {rank}, (waiting at \d\w+ for|sending)", report["message"])
        assert names_the_op, report["message"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_in_one_stage_surfaces_on_every_rank(transport):
    job = failing_job("raise", 1, transport)
    assert set(job.reports) == {0, 1, 2}, job.output
    for rank, report in job.reports.items():
        assert report["kind"] == ("StageError" if rank == 1 else "PeerError")
        assert "stage 1, microbatch 3, op 1F3: ValueError: boom" in report["message"]
        assert report["seconds"] < LONG_SECONDS / 2


@pytest.mark.parametrize("transport", [*map(more, TRANSPORTS[:1]), *TRANSPORTS[1:]])
def test_a_stalled_rank_is_given_up_at_the_deadline(transport):
    job = failing_job("stall", 1, transport)
    assert {0, 2} <= set(job.reports), job.output
    for rank in (0, 2):
        assert job.reports[rank]["kind"] in ("DeadlineError", "PeerError")
        assert re.search(r"rank 1|stalled", job.reports[rank]["message"])
        assert job.reports[rank]["seconds"] < LONG_SECONDS / 2


def test_processes_that_do_not_fit_the_plan_are_told():
    job = forked(JOBS / "misuse.py", 2)
    assert set(job.reports) == {0, 1}, job.output
    for report in job.reports.values():
        assert "the plan has 3 ranks, but the job has 2 processes" in report["too many ranks"]
        assert "rank 1 has built another model than rank 0" in report["different models"]
        assert "clip_norm is 1.0 on rank 0, but 2.0 on rank 1" in report["different settings"]
        assert report["different plans"] == "4"  # rank 0's counts


def test_pipelines_one_after_the_other_with_weights_that_begin_unequal():
    job = forked(JOBS / "again.py", 2)
    assert job.returncode == 0, job.output
    assert job.reports[0] == job.reports[1]  # tied weights are the first holder's everywhere
    assert job.reports[0]["num_threads"] == 2  # as before
    assert job.reports[0]["left"] == [False] * 3
