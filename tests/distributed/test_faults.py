"""Nothing hangs between processes: each fault ends every rank in time, with the first cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.jobs.faults import (
    DEADLINE_SECONDS,
    LONG_SECONDS,
    STALL_SECONDS,
    faults_of,
)
from tests.kit.examples import more
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "faults.py"
NUM_RANKS = 3
GRACE_SECONDS = 40.0
CAUSES = {
    "plainly": r"stage \d, microbatch \d, op \d[A-Z]+\d: ValueError: boom|"
    r"rank \d(,| failed:) step \d: ValueError: boom",
    "at length": r"op \dF\d: ValueError: boom!!!",
    "without words": r"(rank \d(,| failed:) step \d|op \dF\d): RuntimeError: no words",
    # Who waits for a rank that itself waits for the victim may be the first to give up.
    "stalls": r"rank \d did not answer within|nothing was heard of rank {victim}",
    "kills": r"rank {victim} is gone \(its process ended or was killed\)",
}
MISUSED = {
    "loader ends": r"rank {victim} closed its pipeline \(after \d steps, and all|"
    r"rank {victim} ends its loop with this minibatch",
    # In steps(), the minibatch before tells the others already that none will follow.
    "loader raises": r"rank {victim} closed its pipeline \(after \d steps, OSError: disk gone\)|"
    r"the loader of rank {victim} has raised an error behind this minibatch",
    "closes early": r"rank {victim} closed its pipeline \(after \d steps, and all",
    "evaluates": r"make the same calls on every rank",
    "fewer microbatches": r"rank {victim} has 2 microbatches|but rank {victim} has 2",
}


def cause_of(fault):
    if fault.kind == "nan":
        return r"op \dF\d: ArithmeticError: the loss is nan"
    return (MISUSED.get(fault.kind) or CAUSES[fault.how]).format(victim=fault.victim)


def check(fault, rank, report):
    """A rank has ended in time, knows the cause, and tells what it did last."""
    own = rank == fault.victim
    limit = (STALL_SECONDS if fault.how == "stalls" else DEADLINE_SECONDS) + GRACE_SECONDS
    assert report["seconds"] < limit
    if own and (fault.kind == "closes early" or not report["message"]):
        assert fault.kind in ("closes early", "loader ends")
        return
    if own and fault.kind == "loader raises":
        assert report["message"] == "disk gone"
        return
    assert report["kind"] in ("StageError", "PeerError", "DeadlineError", "RunError")
    if own and fault.how == "stalls":
        assert "within" in report["message"]
    else:
        assert re.search(cause_of(fault), report["message"])
    if not own:
        assert re.match(rf"rank {rank}, (waiting|sending|end of)", report["message"])
    assert report["notes"][-1].startswith(f"rank {rank}: did ")
    assert re.match("this pipeline has failed.*start the job again", report["again"], re.DOTALL)


@pytest.mark.parametrize(
    ("transport", "seed", "most"),
    [
        ("shared-memory", 0, 5),
        more("process-group", 3, 4),
        more("two hosts", 5, 4),
        more("shared-memory", 0, 16),
        more("shared-memory", 1, 100),
    ],
)
def test_every_fault_ends_every_rank_in_time_with_the_first_cause(transport, seed, most):
    job = forked(JOB, NUM_RANKS, transport, str(seed), str(most))
    assert set(job.reports) == set(range(NUM_RANKS)), job.output
    for index, fault in enumerate(faults_of(seed, NUM_RANKS, most)):
        for rank, report in job.reports.items():
            try:
                check(fault, rank, report["faults"][index])
            except AssertionError as error:
                raise AssertionError(
                    f"rank {rank}, {transport}, seed {seed}, {fault}: {report['faults'][index]}"
                ) from error
    for report in job.reports.values():
        assert report["left"] == []
        assert report["threads"] == 1


@pytest.mark.parametrize(
    ("transport", "victim"), [("shared-memory", 1), ("process-group", 0), ("two hosts", 2)]
)
def test_a_killed_rank_is_named_by_every_other(transport, victim):
    job = forked(JOB, NUM_RANKS, transport, "kill", str(victim))
    assert set(job.reports) == set(range(NUM_RANKS)) - {victim}, job.output
    for rank, report in job.reports.items():
        (told,) = report["faults"]
        assert told["kind"] == "PeerError", told
        assert f"rank {victim} is gone (its process ended or was killed)" in told["message"]
        assert re.match(rf"rank {rank}, (waiting|sending|end of)", told["message"])
        assert told["seconds"] < LONG_SECONDS / 2
        assert told["notes"][-1].startswith(f"rank {rank}: did ")
