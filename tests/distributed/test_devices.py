"""Jobs of several processes, each with an accelerator of its own, which are emulated ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.accelerator import building
from tests.kit.examples import more
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "devices.py"

pytestmark = pytest.mark.skipif(bool(building.why_not()), reason=building.why_not() or "")


@pytest.mark.parametrize(
    ("num_ranks", "cases", "transport"),
    [
        (2, "two", "shared-memory"),
        (2, "two", "process-group"),
        (2, "two", "auto"),
        (2, "two linked", "auto"),
        more(2, "two linked", "shared-memory"),
        (4, "four", "auto"),
    ],
)
def test_processes_train_on_their_own_devices_as_threads_on_the_cpu(num_ranks, cases, transport):
    done = forked(JOB, num_ranks, cases, transport)
    assert done.returncode == 0, done.output
    assert done.reports == {rank: [] for rank in range(num_ranks)}


def test_ranks_whose_devices_cannot_be_linked_say_why_and_train_all_the_same():
    done = forked(JOB, 2, "apart", "auto")
    assert done.returncode == 0, done.output
    assert done.reports == {0: [], 1: []}


def test_where_the_library_cannot_connect_devices_all_go_through_main_memory():
    done = forked(JOB, 2, "refused", "auto")
    assert done.returncode == 0, done.output
    why = "emulated could not connect them (rank 0: no route to the other device)"
    for told, *_ in done.reports.values():
        assert told.endswith(f"through main memory between ranks 0 and 1 ({why}).")
    assert [len(reports) for reports in (done.reports[0], done.reports[1])] == [2, 1]
    assert done.reports[0][1].startswith(f"tensors go through main memory, which is slower: {why}")


def test_a_rank_that_fails_with_tensors_under_way_leaves_nothing_behind():
    done = forked(JOB, 2, "failing", "auto")
    assert done.returncode == 0, done.output
    for (told,) in done.reports.values():
        assert "rank 1 failed" in told or "stage 1" in told
        assert "boom" in told


def test_no_host_waits_where_tensors_go_straight_to_the_other_device():
    done = forked(JOB, 2, "waits", "auto")
    assert done.returncode == 0, done.output
    for counts in done.reports.values():
        assert counts["bytes"] > 0
        assert counts["reads"] == counts["waits"] == counts["connected"] == 0


def test_a_host_waits_for_what_it_hands_over_in_main_memory_and_for_nothing_else():
    done = forked(JOB, 2, "waits", "shared-memory")
    assert done.returncode == 0, done.output
    for counts in done.reports.values():
        assert counts["bytes"] == counts["reads"] == 0
        assert 0 < counts["waits"] <= 8 * 4  # steps, and messages in each
