"""Checkpoints of several processes, each of which writes and reads its own part."""

from pathlib import Path

import pytest

from penstock.training.checkpoint.folder import checkpoint_in, folder_name
from tests.distributed.jobs.checkpoints import train
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "checkpoints.py"


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), 8)[1]


def test_processes_and_threads_go_on_from_each_other(expected, tmp_path):
    ways = ("shared-memory", "threads", "process-group", "process-group", "one thread")
    losses = []
    for way in ways:
        if way in ("threads", "one thread"):
            position, more = train(tmp_path, 1, num_ranks=2 if way == "threads" else 1)
        else:
            job = forked(JOB, 2, way, str(tmp_path), "2")
            assert set(job.reports) == {0, 1}, job.output
            assert job.reports[0] == job.reports[1]
            position, more = job.reports[0]["position"], job.reports[0]["losses"]
        assert position == (len(losses) or None)
        losses += more
    assert losses == expected


def test_ranks_that_see_different_folders_are_told(tmp_path):
    train(tmp_path / "0", 2)
    train(tmp_path / "1", 1)
    job = forked(JOB, 2, "apart", str(tmp_path), "1")
    assert set(job.reports) == {0, 1}, job.output
    for report in job.reports.values():
        assert "rank 0 sees step-00000002" in report["error"]
        assert "rank 1 step-00000001; put the folder where all hosts see" in report["error"]


def test_what_does_not_fit_a_rank_is_told_to_all(tmp_path):
    """Rank 1 cannot read its part; rank 0, which could, changes nothing either."""
    train(tmp_path, 2)
    path = checkpoint_in(tmp_path).folder / "stage-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    job = forked(JOB, 2, "shared-memory", str(tmp_path / folder_name(2)), "0")
    assert all("cannot read" in report["error"] for report in job.reports.values()), job.reports
