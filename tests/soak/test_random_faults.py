"""A hundred faults that chance draws: none hangs a rank, and each survivor is told the cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.launch import forked
from tests.soak.jobs.one_fault import DEADLINE_SECONDS, STARTUP_SECONDS, fault_of

JOB = Path(__file__).parent / "jobs" / "one_fault.py"
NUM_FAULTS = 100
GRACE_SECONDS = 60.0
TOLD = {
    "kill": r"rank {victim} (is gone|has ended|did not)|ended",
    "stop": r"rank {victim}|rank \d did not",
    "raise": r"boom",
    # Who leaves a loop over steps first ends what is under way, for which others may be late.
    "exit": r"exit|rank {victim} (is gone|closed|has ended|failed|did not answer)",
    "loader ends": r"closed its pipeline|loops|minibatches|rank {victim}",
    "wrong data": r"minibatch|data|same",
    "little memory": r"memory|rank {victim}",
}
"""What a survivor's message must have in it."""
EARLY = r"rank {victim} (did not come|is gone|has ended)"
"""If the victim never came to its Pipeline: nobody there can know why."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.mark.parametrize("seed", range(NUM_FAULTS))
def test_a_fault_ends_every_rank_with_its_cause(seed):
    fault = fault_of(seed)
    job = forked(JOB, fault.num_ranks, str(seed), limit_seconds=380)
    ranks = set(range(fault.num_ranks))
    survivors = ranks if fault.spares_others else ranks - {fault.victim}
    assert survivors <= set(job.reports), f"{fault}\n{job.output}"
    for rank in survivors:
        check(fault, rank, job.reports[rank])


def check(fault, rank, report):
    told = f"rank {rank}, {fault}: {report}"
    assert report["seconds"] < STARTUP_SECONDS + DEADLINE_SECONDS + GRACE_SECONDS, told
    if fault.spares_others:
        assert report["kind"] == "", told
        return
    assert report["kind"] in (
        "StageError",
        "PeerError",
        "DeadlineError",
        "RunError",
        "InputError",
    ), told
    early = fault.moment == "before the pipeline"
    expected = (EARLY if early else TOLD[fault.means]).format(victim=fault.victim)
    assert re.search(expected, report["message"]), told
