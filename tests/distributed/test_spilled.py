"""Stages that come and go, where processes meet, memory ends, and anything may be killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.planning.plans.spilling import Spill
from tests.distributed.jobs.spilled import offloaded, train
from tests.kit.examples import TIMES, more
from tests.kit.launch import ENVIRONMENT, forked
from tests.kit.paths import ROOT
from tests.kit.spilling import HOST

JOB = Path(__file__).parent / "jobs" / "spilled.py"


def job(*arguments):
    """A process of its own, from which lines can be read."""
    command = [sys.executable, str(JOB), *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(*arguments):
    """What a job says last."""
    with job(*arguments) as process:
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def test_two_processes_give_the_bits_of_what_stays(tmp_path):
    done = forked(JOB, 2, "ranks", str(tmp_path))
    assert set(done.reports) == {0, 1}, done.output
    assert done.reports[0] == train(None, None, num_ranks=2)
    assert done.reports[1]["losses"] == done.reports[0]["losses"]
    assert not list(tmp_path.iterdir())


def test_activations_of_two_processes_leave_and_no_bit_changes(tmp_path):
    done = forked(JOB, 2, "offload", str(tmp_path))
    assert set(done.reports) == {0, 1}, done.output
    stays = offloaded(None)
    assert done.reports[0]["left"] > 0 == stays["left"]
    assert done.reports[0]["losses"] == done.reports[1]["losses"] == stays["losses"]
    assert done.reports[0]["digest"] == stays["digest"]
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_a_kill_while_a_save_reads_the_tier_leaves_the_checkpoint_before_it(tmp_path):
    folder = tmp_path / "run"
    with job("interrupted", folder) as process:
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no spill file
    expected = train(None, Spill(tier=HOST))
    with pytest.warns(RuntimeWarning, match="step-00000004 is not complete"):
        done = train(folder, Spill(tier=HOST))
    assert done["losses"] == expected["losses"][3:]
    assert done["digest"] == expected["digest"]


def test_freed_memory_is_kept_in_a_tight_budget_as_far_as_it_goes(tmp_path):
    report = told("tight", tmp_path)
    # Without, each update would make two new tensors for a weight.
    assert report["faults"] < 1.5 * report["pages"]


@pytest.mark.parametrize("way", [more("spilled"), more("memory")])
def test_the_system_allows_a_part_of_what_is_trained(tmp_path, way):
    """RLIMIT_DATA is what the process has before, the budget, and a little."""
    report = told(way, tmp_path)
    if way == "memory":
        assert "allocate memory" in report["error"]
        return
    assert report["peak"] <= report["allowed"]
    assert len(report["losses"]) == 4
    # Gradients of two microbatches and what the optimizer makes are four times the weights.
    assert report["faults"] < report["pages"] / 2
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(400 * TIMES)  # a hundred kills take more than one
def test_a_kill_at_any_moment_leaves_the_last_checkpoint_and_nothing_else(tmp_path):
    expected = train(None, Spill(tier=HOST))
    chance = random.Random(5)
    for attempt in range(1 if TIMES == 1 else 100):
        folder = tmp_path / str(attempt) / "run"
        folder.parent.mkdir()
        with job("alone", folder) as process:
            for _ in range(chance.randint(1, 4)):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        assert [path.name for path in folder.parent.iterdir()] == ["run"]  # no spill file
        done = train(folder, Spill(tier=HOST))
        assert 0 < len(done["losses"]) < len(expected["losses"])
        assert done["losses"] == expected["losses"][-len(done["losses"]) :]
        assert done["digest"] == expected["digest"]
