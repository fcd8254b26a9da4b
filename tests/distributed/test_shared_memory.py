"""Real processes that share memory: how they end, what is left, and two hosts in one job."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.distributed.jobs.shared_memory_ends import DEADLINE_SECONDS, LONG_SECONDS, VICTIM
from tests.distributed.jobs.shared_memory_mixed import DEADLINE_SECONDS as MIXED_SECONDS
from tests.kit.examples import more
from tests.kit.launch import forked

JOBS = Path(__file__).parent / "jobs"
GONE = f"rank {VICTIM} is gone (its process ended or was killed)"
BOOM = f"cancelled because rank {VICTIM} failed: boom"
LATE = f"rank {VICTIM} did not answer within {DEADLINE_SECONDS:g} s"


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("succeed", "PeerError", f"rank {VICTIM} closed its pipeline (the work is done)"),
        more("leave", "PeerError", f"rank {VICTIM} closed its pipeline (its process ended)"),
        more("fail", "PeerError", BOOM),
        more("kill", "PeerError", GONE),
        ("kill_with_child", "PeerError", GONE),
        ("stall", "DeadlineError", LATE),
    ],
)
def test_however_a_process_ends_the_others_know_at_once_and_nothing_is_left(how, kind, told):
    done = forked(JOBS / "shared_memory_ends.py", 1, how)
    assert done.returncode == 0, done.output
    parent = json.loads(done.output.splitlines()[-1])
    assert parent["after"] == parent["before"]
    killed = -signal.SIGKILL if how.startswith("kill") else 0
    assert parent["exits"] == [0, killed, 0], done.output
    reports = [done.reports[rank] for rank in (0, 2)]
    for report in reports:
        assert told in report["message"]
        assert report["seconds"] < LONG_SECONDS / 2
        assert report["held"] == 3
    assert kind in {report["kind"] for report in reports}


def test_two_hosts_in_one_job_use_shared_memory_within_and_messages_between():
    job = forked(JOBS / "shared_memory_mixed.py", 4)
    assert set(job.reports) == {1, 2, 3}, job.output  # 0 was killed
    all_came = [54, True]
    for rank, report in job.reports.items():
        others = sorted({0, 1, 2, 3} - {rank})
        neighbour = [rank ^ 1]
        ways = report["ways"]
        assert ways["auto, two hosts"] == [neighbour, all_came]
        assert ways["auto, None"] == ways["shared-memory, None"] == [others, all_came]
        assert ways["process-group, None"] == ways["process-group, two hosts"] == [[], all_came]
        assert "shared memory cannot be had between all ranks" in ways["shared-memory, two hosts"]
        assert "is on another host than" in ways["shared-memory, two hosts"]
        near, came, warned, refused = report["fall back"]
        assert (near, came, warned) == ([], all_came, [])  # rank 0 warns
        assert "rank 2 could not get 4,096 bytes of shared memory" in refused
        message, seconds = report["news"]
        assert message.startswith(f"rank {rank}, waiting: ")
        assert "rank 0 is gone (its process ended or was killed)" in message
        assert seconds < MIXED_SECONDS / 2
    assert job.output.count("which is slower than shared memory") <= 1
