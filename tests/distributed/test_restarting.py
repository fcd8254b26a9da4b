"""``penstock run``: ranks are killed, raise, exit and hang, and train as if they had not."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.jobs.restarting import pipeline_of, train
from tests.kit.examples import more
from tests.kit.launch import torchrun
from tests.kit.supervised import (
    children,
    num_descriptors,
    number_in,
    supervised,
    wait_until_gone,
)
from tests.kit.waiting import until

# Each worker would load what supervisors are forked from.
pytestmark = pytest.mark.xdist_group("supervised")

JOB = Path(__file__).parent / "jobs" / "restarting.py"
STRANGER = Path(__file__).parent / "jobs" / "stranger.py"
NUM_RANKS = 3


@cache
def losses_of(num_steps):
    """Those of a run that never stops, in threads."""
    with pipeline_of(NUM_RANKS, transport="threads") as pipeline:
        return [train(pipeline, step, None) for step in range(num_steps)]


def check_losses(folder, num_steps):
    """Whoever trained on a minibatch, however often, saw the loss of the run that never stops."""
    seen = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    expected = losses_of(num_steps)
    assert {step for step, _ in seen} == set(range(num_steps))
    assert [loss for _, loss in seen] == [expected[step] for step, _ in seen]


def pids(folder, attempt):
    return [number_in(folder / f"{attempt}-{rank}") for rank in range(NUM_RANKS)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("seed", "num_kills"), [(0, 5), more(0, 12), more(1, 100)])
def test_a_run_that_is_killed_again_and_again_trains_as_if_it_never_stopped(
    tmp_path, seed, num_kills
):
    draw = random.Random(seed)
    num_steps = 3 * num_kills + 3
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with supervised(
        tmp_path / "output", JOB, "-n", NUM_RANKS, "--restarts", num_kills, tmp_path, num_steps,
        ATTEMPTS=str(num_kills + 1), TMPDIR=str(temporary),
    ) as job:  # fmt: skip
        everybody, descriptors = set(), []
        for attempt in range(num_kills):
            ranks = pids(tmp_path, attempt)
            everybody |= {*children(job.process), *ranks}
            descriptors.append(num_descriptors(job.process))
            time.sleep(draw.uniform(0, 0.6))
            os.kill(draw.choice(ranks), signal.SIGKILL)
        assert job.wait() == 0, job.said()
    check_losses(tmp_path, num_steps)
    assert len({*descriptors}) == 1, descriptors  # nothing is left open from attempt to attempt
    assert len(everybody) >= num_kills * NUM_RANKS
    wait_until_gone(everybody, limit_seconds=0)
    # What torch makes when it is loaded, and nothing of ours.
    assert all(path.name.startswith("torchinductor_") for path in temporary.iterdir())
    assert job.said().count("was ended by SIGKILL") >= num_kills


@pytest.mark.soak
def test_a_job_goes_on_without_a_slot_that_is_lost(tmp_path):
    """Rank 1 is killed in every attempt in which there is one at its step; those that are left have
    another plan, and the same losses."""
    with supervised(
        tmp_path / "output", JOB, "-n", NUM_RANKS, "--restarts", 5, "--elastic", tmp_path, 9,
        "SIGKILL:1:2:1", "SIGKILL:1:3:2",
    ) as job:  # fmt: skip
        assert job.wait() == 0, job.said()
    said = job.said()
    assert "slot 1 is given up, and training goes on with 2 ranks (2 of 5)" in said
    assert (tmp_path / "2-1").exists()
    assert not (tmp_path / "2-2").exists()
    check_losses(tmp_path, 9)


@pytest.mark.parametrize("kept", ["use", pytest.param("step", marks=pytest.mark.soak)])
def test_copies_that_have_rows_go_on_with_fewer_of_them(tmp_path, kept, monkeypatch):
    """Rows of three copies are loaded by two; their sums are in another order."""
    with supervised(
        tmp_path / "output", JOB, "-n", NUM_RANKS, "--restarts", 5, "--elastic", tmp_path, 6,
        "SIGKILL:1:2:1", "SIGKILL:1:3:2", GATHERED_FOR=kept,
    ) as job:  # fmt: skip
        assert job.wait() == 0, job.said()
    assert "training goes on with 2 ranks" in job.said()
    monkeypatch.setenv("GATHERED_FOR", kept)
    with pipeline_of(NUM_RANKS, transport="threads") as pipeline:
        expected = [train(pipeline, step, None) for step in range(6)]
    seen = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert {step for step, _ in seen} == {*range(6)}
    assert [loss for _, loss in seen] == pytest.approx([expected[step] for step, _ in seen])


@pytest.mark.soak
def test_the_same_error_at_the_same_step_ends_the_job_at_its_second_time(tmp_path):
    with supervised(
        tmp_path / "output", JOB, "-n", NUM_RANKS, "--restarts", 9, tmp_path, 8,
        "SIGKILL:0:2:1", "raise:1:4:9", fresh=True,
    ) as job:  # fmt: skip
        assert job.wait() == 1
    said = job.said()
    assert "penstock: rank 1 failed: ValueError: no luck with <object object at 0x" in said
    assert "at step 4: the same error as before, so it would come again" in said
    assert (tmp_path / "2-0").exists()
    assert not (tmp_path / "3-0").exists()
    # As Python does: a traceback begins with the script.
    assert 'restarting.py", line' in said
    assert "supervisor/job.py" not in said


def test_a_script_that_exits_is_started_again_and_its_code_is_that_of_the_job(tmp_path):
    with supervised(
        tmp_path / "output", "-n", NUM_RANKS, "--restarts", 5, JOB, tmp_path, 4, "exit:2:3:9"
    ) as job:
        assert job.wait() == 3
    assert "rank 2 ended with exit code 3, at step 3: the same error as before" in job.said()
    assert not (tmp_path / "2-0").exists()


def test_kills_are_no_error_and_count_against_the_restarts(tmp_path):
    with supervised(
        tmp_path / "output", "-n", NUM_RANKS, "--restarts", 2, JOB, tmp_path, 4, "SIGKILL:1:3:9"
    ) as job:
        assert job.wait() == 128 + signal.SIGKILL
    said = job.said()
    assert "rank 1 was ended by SIGKILL, at step 3; the machine may be out of memory" in said
    assert "2 restarts are spent" in said
    assert all(f"attempt {attempt} meets SIGKILL\n" in said for attempt in range(3))
    rows = [line for line in said.splitlines() if line.startswith("rank 1 was ended")]
    assert len(rows) == 3


def test_a_stopped_rank_is_killed_when_others_are_to_start_again(tmp_path):
    with supervised(
        tmp_path / "output", "-n", NUM_RANKS, "--restarts", 1, "--grace", 0.3, JOB, tmp_path, 6,
        "SIGSTOP:0:3:1", "SIGKILL:1:3:1",
    ) as job:  # fmt: skip
        assert job.wait() == 0, job.said()
    check_losses(tmp_path, 6)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_supervisor_and_all_ranks(tmp_path, number, code):
    with supervised(
        tmp_path / "output", "-n", NUM_RANKS, "--restarts", 5, JOB, tmp_path, 4, ATTEMPTS="2"
    ) as job:
        ranks = pids(tmp_path, 0)
        own = children(job.process)
        assert own > set(ranks)
        wait_for_losses(tmp_path, 3)
        os.killpg(job.process, number)  # as a terminal does
        assert job.wait() == code
    wait_until_gone(own, limit_seconds=0)
    # Each rank gets it exactly once.
    told = NUM_RANKS if number == signal.SIGINT else 0
    assert job.said().count("\nKeyboardInterrupt") + job.said().count("]: KeyboardInterrupt") == (
        told
    )
    assert f"penstock: ended by {number.name}" in job.said()
    assert not (tmp_path / "1-0").exists()


def wait_for_losses(folder, count):
    """Wait until so many losses are there."""
    losses = folder / "losses"
    assert until(lambda: losses.exists() and losses.read_text().count("\n") >= count, 200)


def test_ranks_end_with_their_supervisor_however_that_ends(tmp_path):
    with supervised(tmp_path / "output", "-n", NUM_RANKS, JOB, tmp_path, 4, ATTEMPTS="2") as job:
        pids(tmp_path, 0)
        own = children(job.process)
        job.send(signal.SIGKILL)
        job.wait()
        assert len(own) == NUM_RANKS + 1
        wait_until_gone(own)


def test_the_death_of_who_keeps_the_store_is_one_like_others(tmp_path):
    with supervised(
        tmp_path / "output", "-n", NUM_RANKS, "--restarts", 1, JOB, tmp_path, 6, ATTEMPTS="2"
    ) as job:
        ranks = pids(tmp_path, 0)
        (keeper,) = children(job.process) - set(ranks)
        os.kill(keeper, signal.SIGKILL)
        assert job.wait() == 0, job.said()
    check_losses(tmp_path, 6)
    assert "the keeper of the job's store was ended by SIGKILL" in job.said()


def test_two_jobs_at_once_do_not_meet(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    trouble = "SIGKILL:1:2:1"
    with (
        supervised(
            folders[0] / "output", "-n", NUM_RANKS, "--restarts", 1, JOB, folders[0], 5, trouble
        ) as first,
        supervised(
            folders[1] / "output", "-n", NUM_RANKS, "--restarts", 1, JOB, folders[1], 5, trouble
        ) as second,
    ):
        assert first.wait() == 0, first.said()
        assert second.wait() == 0, second.said()
    for folder in folders:
        check_losses(folder, 5)


@pytest.mark.soak
@pytest.mark.parametrize(
    "variable", [{}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}], ids=["as it is", "apart"]
)
def test_torchrun_restarts_the_same_script(tmp_path, variable):
    job = torchrun(
        JOB,
        NUM_RANKS,
        str(tmp_path),
        "6",
        "SIGKILL:1:3:1",
        reports=False,
        options=("--max-restarts", "1"),
        environment=variable,
    )
    assert job.returncode == 0, job.output
    check_losses(tmp_path, 6)
    assert (tmp_path / "1-1").exists()


# What differs by its nature: where the store is, and what only one of the two has.
OF_ONE = {"MASTER_ADDR", "MASTER_PORT"} | {
    f"TORCHELASTIC_{name}" for name in ("RUN_ID", "ERROR_FILE", "SIGNALS_TO_HANDLE")
}


@pytest.mark.soak
@pytest.mark.parametrize("is_module", [False, True])
def test_a_rank_finds_what_it_would_find_under_torchrun(tmp_path, is_module):
    job = (
        "tests.distributed.jobs.surroundings" if is_module else str(JOB.parent / "surroundings.py")
    )
    words = ["-m", job] if is_module else [job]
    (tmp_path / "forked").mkdir()
    (tmp_path / "fresh").mkdir()
    with supervised(
        tmp_path / "output", "-n", 2, *words, "--lr", 0.1, tmp_path / "forked", fresh=True
    ) as ours:
        assert ours.wait() == 0, ours.said()
    theirs = torchrun(
        words[-1], 2, "--lr", "0.1", str(tmp_path / "fresh"), reports=False,
        options=["-m"] if is_module else [],
    )  # fmt: skip
    assert theirs.returncode == 0, theirs.output
    draws = []
    for rank in range(2):
        found, expected = (
            json.loads((tmp_path / folder / str(rank)).read_text())
            for folder in ("forked", "fresh")
        )
        draws += [found.pop("draws"), expected.pop("draws")]
        for name in OF_ONE:
            found["environment"].pop(name, None)
            expected["environment"].pop(name, None)
        assert found == expected
    # Nobody has seeded anything, so no two processes draw the same.
    assert all(len(set(drawn)) == len(draws) for drawn in zip(*draws, strict=True))


@pytest.mark.parametrize("arguments", [(), ("own-group",)], ids=["", "the script's own group"])
def test_strangers_can_read_no_secret_of_a_job_and_tell_it_no_failure(tmp_path, arguments):
    """torch's store listens on a port of the host and asks nobody who it is."""
    with supervised(tmp_path / "output", "-n", NUM_RANKS, STRANGER, tmp_path, *arguments) as job:
        assert job.wait() == 0, job.said()
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["losses"] == losses_of(2)
    assert seen["after"] == seen["before"]  # nothing that ranks tell each other stands there
