"""Which of many ends is the cause, and whether it is the same one as before."""

from __future__ import annotations

import pytest

from penstock.engine.run.logbook import Notes, ScriptFailure
from penstock.training.supervisor.job import Script, SupervisedJob
from penstock.training.supervisor.processes import Ended, cause_of, first_cause


def failed(rank, reason, *, step=5, followed=False):
    return Ended(f"rank {rank}", 1, Notes(None, 0, step, ScriptFailure(reason, followed)))


def killed(rank, number=9, step=5):
    return Ended(f"rank {rank}", -number, Notes(None, 0, step, None))


def test_a_kill_counts_before_the_errors_that_it_leads_to():
    ended = [failed(0, "rank 1 is gone", followed=True), failed(2, "broken pipe"), killed(1)]
    assert first_cause(ended).reason == "rank 1 was ended by SIGKILL"


def test_an_error_counts_before_what_others_hear_of_it():
    ended = [failed(0, "rank 1 failed: boom", followed=True), failed(1, "rank 1 failed: boom")]
    assert not first_cause(ended).followed
    assert first_cause(ended[:1]).known_as == first_cause(ended[1:]).known_as


@pytest.mark.parametrize(
    ("number", "own_fault"), [(9, False), (15, False), (11, True), (6, True), (7, True)]
)
def test_only_signals_of_own_faults_are_errors(number, own_fault):
    assert cause_of(killed(1, number)).own_fault is own_fault
    assert cause_of(killed(1, number)).code == 128 + number


def test_a_signal_without_a_name_has_its_number():
    assert cause_of(killed(1, 40)).reason == "rank 1 was ended by signal 40"


def test_an_address_makes_no_other_error_and_a_step_does():
    first, second = (failed(1, f"rank 1 failed: <object at 0x7f{digit}>") for digit in "ab")
    assert cause_of(first).known_as == cause_of(second).known_as
    later = failed(1, "rank 1 failed: <object at 0x7fa>", step=6)
    assert cause_of(first).known_as != cause_of(later).known_as


def test_words_for_people():
    assert str(cause_of(failed(1, "rank 1 failed: boom"))) == "rank 1 failed: boom, at step 5"
    assert str(cause_of(failed(1, "rank 1 failed: boom", step=None))) == "rank 1 failed: boom"
    told = str(cause_of(killed(0)))
    assert told == "rank 0 was ended by SIGKILL, at step 5; the machine may be out of memory"
    keeper = Ended("the keeper of the job's store", 0, None)
    assert str(cause_of(keeper)) == "the keeper of the job's store ended with exit code 0"
    assert cause_of(keeper).code == 1


def test_who_is_left_keeps_its_slot():
    job = SupervisedJob(Script(__file__, ()), 4, elastic=True).without(1)
    local = [job.environment(rank, 2, 1, 1, 1)["LOCAL_RANK"] for rank in range(3)]
    assert local == ["0", "2", "3"]
    assert job.environment(0, 2, 1, 1, 1)["WORLD_SIZE"] == "3"
    assert job.without(0).slots == (2, 3)
