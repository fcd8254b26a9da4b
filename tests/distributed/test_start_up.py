"""Ranks that come late, fail, stop or die while pipelines start; and what many pipelines leave."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.jobs.start_up import CASES, LONG_SECONDS, SOON_SECONDS
from tests.kit.launch import ENVIRONMENT
from tests.kit.paths import ROOT

pytestmark = [pytest.mark.xdist_group("start-up"), pytest.mark.timeout(600)]

JOB = Path(__file__).parent / "jobs" / "start_up.py"
LATE = rf"rank {{victim}} did not come {{asked}} within {SOON_SECONDS:g} s"
SILENT = r"the store of the job, which torchrun or rank 0 keeps, did not answer"
GONE = r"rank {victim} is gone \(its process ended or was killed\)"
CAUSES = {
    "killed before": LATE.format(victim="{victim}", asked="to its Pipeline"),
    "stopped before": LATE.format(victim="{victim}", asked="to its Pipeline"),
    "raises during": "the optimizer of stage 1 cannot be made: ValueError: no such optimizer",
    "killed during": f"{GONE}, before it came to start training",
    "stopped during": LATE.format(victim="{victim}", asked="to start training"),
    "keeper stopped before": SILENT,
    "keeper stopped during": SILENT,
    "keeper killed during": rf"the process that kept the job's store .* is gone|{GONE}",
    "never comes": r"rank \d did not meet the others at 127\.0\.0\.1:\d+|did not come to its",
}


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """What every rank of every job tells; the jobs run at the same time."""
    folder = tmp_path_factory.mktemp("start-up")
    done = subprocess.run(
        [sys.executable, JOB, folder],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[int, dict]] = {name: {} for name in CASES}
    for path in folder.glob("*.json"):
        name, _, rank = path.stem.rpartition("-")
        found[name][int(rank)] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", CAUSES)
def test_a_rank_in_trouble_ends_all_others_in_time_with_the_cause(reports, name):
    case = CASES[name]
    survivors = set(range(case.num_ranks)) - ({case.victim} if case.how != "fail" else set())
    assert set(reports[name]) == survivors
    for rank, report in reports[name].items():
        assert report["kind"] in ("DeadlineError", "PeerError", "InputError"), report
        assert (report["kind"] == "InputError") == (case.how == "fail" and rank == case.victim)
        assert re.search(CAUSES[name].format(victim=case.victim), report["message"]), report
        # At once, whatever the deadline, or at one that is short.
        assert report["seconds"] < LONG_SECONDS


def test_a_first_step_may_take_longer_than_later_ones(reports):
    told = reports["slow"]
    assert set(told) == {0, 1, 2}
    assert len({tuple(report["losses"]) for report in told.values()}) == 1
    for rank in (0, 2):
        assert "rank 1 did not answer within 1 s" in told[rank]["message"]
        assert "raise deadline_seconds" in told[rank]["message"]


def test_many_pipelines_leave_no_descriptors_and_no_threads(reports):
    for report in reports["many"].values():
        # Ways take turns; the group of the last pipeline stays until the next one is built.
        descriptors, threads = zip(*report["counts"], strict=True)
        assert max(descriptors[8:]) <= max(descriptors[:8])
        assert max(threads[8:]) <= max(threads[:8])
