"""``penstock run``: which words are its own, and what it refuses."""

from __future__ import annotations

import pytest

from penstock.cli import penstock
from penstock.training.supervisor import (
    AttemptMoments,
    AttemptRecord,
    FailureCause,
    SupervisionResult,
)
from tests.kit.command_line import refused, run

VERB = penstock.get_command(None, "run")


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """The verb sets it for the ranks."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("line", "own", "words"),
    [
        ("train.py -n 4 --restarts 10", (4, 10, None), ("train.py",)),
        ("-n 4 --restarts=10 train.py", (4, 10, None), ("train.py",)),
        ("-n 4 train.py --lr 0.1 -n 7", (4, 0, None), ("train.py", "--lr", "0.1", "-n", "7")),
        ("train.py -n 4 data --restarts 3", (4, 0, None), ("train.py", "data", "--restarts", "3")),
        ("-n 4 train.py -- -n 7", (4, 0, None), ("train.py", "-n", "7")),
        ("-n 4 -- train.py --restarts 3", (4, 0, None), ("train.py", "--restarts", "3")),
        ("-n 4 train.py -- --", (4, 0, None), ("train.py", "--")),
        ("-n 4 -m pkg.train --lr 0.1 -n 7", (4, 0, "pkg.train"), ("--lr", "0.1", "-n", "7")),
        ("-n 4 -m pkg.train -- -n 7", (4, 0, "pkg.train"), ("-n", "7")),
        ("-m pkg.train -n 4", (4, 0, "pkg.train"), ()),
        ("-n4 train.py -v", (4, 0, None), ("train.py", "-v")),
    ],
)
def test_options_stand_before_the_script_or_directly_behind_it(line, own, words):
    given = VERB.make_context("run", line.split()).params
    assert (given["ranks"], given["restarts"], given["module"]) == own
    assert given["words"] == words


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("train.py", "Missing option '-n'"),
        ("-n 0 train.py", "0 is not in the range x>=1"),
        ("-n 2 --restarts -1 train.py", "-1 is not in the range x>=0"),
        ("-n 2 --grace -1 train.py", "-1.0 is not in the range x>=0"),
        ("-n two train.py", "'two' is not a valid integer"),
        ("-n 2 --restart 3 train.py", "No such option '--restart'"),
        ("-n 2", "there is no script; try penstock run train.py -n 4"),
        ("-n 2 no/such/file.py", "the script no/such/file.py is not there"),
        ("-n 2 tests", "the script tests is a folder; give the path of a Python file"),
        ("-n 2 -m no.such.module", "there is no module no.such.module"),
        ("-n 2 -m nothing_of_this_name", "there is no module nothing_of_this_name"),
        ("-n 2 -m .relative", "there is no module .relative"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(line, told):
    assert told in refused("run", *line.split())


def test_help_says_whose_words_are_whose():
    told = run("run", "--help")
    assert "SCRIPT [ARGS]..." in told
    assert "Options stand before SCRIPT or directly behind it" in told


@pytest.mark.parametrize(
    "line", ["-n 1 train.py -n 2", "-n 4 train.py -m large", "train.py -n 1 -n 2"]
)
def test_options_that_the_script_would_miss_are_refused(line):
    told = refused("run", *line.split())
    assert "behind train.py would be an option of penstock run; put -- between" in told


def test_attempts_are_drawn(tmp_path, monkeypatch):
    """Two attempts: a rank is killed, and one that goes on to the end."""
    target = tmp_path / "it.svg"
    cause = FailureCause("rank 1 was ended by SIGKILL", 61, 137, own_fault=False)
    killed = AttemptRecord(cause, None, 0, AttemptMoments(10.0, 10.1, 12.0, 18.0, 18.1), 2)
    well = AttemptRecord(None, None, 60, AttemptMoments(18.1, 18.2, 19.0, None, 25.0), 2)
    monkeypatch.setattr(
        "penstock.training.supervisor.supervise", lambda *_: SupervisionResult((killed, well), 0)
    )
    (tmp_path / "train.py").touch()
    run("run", "-n", "2", "--draw", target, tmp_path / "train.py")
    picture = target.read_text()
    assert picture.count('class="F s0"') == 3  # the legend, and what each attempt trained
    for words in ("attempt 1", "from step 60", "SIGKILL", "all ranks ended well"):
        assert words in picture
    assert "must end in .svg" in refused("run", "-n", "2", "--draw", "it.gif", "train.py")
