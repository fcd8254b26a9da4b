"""What takes long says so on standard error, and nothing else does."""

from __future__ import annotations

import sys
import threading
import time

import pytest

import penstock as pk
from penstock.base import telling
from penstock.base.telling import Telling, tells
from penstock.cli import show
from tests.kit.command_line import succeed
from tests.kit.helpers import make_batch, make_mlp

LONG_SECONDS = 60


@pytest.fixture
def soon(monkeypatch):
    """Lines come at once, and again and again."""
    monkeypatch.setattr(telling, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.01)
    monkeypatch.delenv("PENSTOCK_QUIET", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def told(capfd, *, lines=1):
    """What is said until there are some lines."""
    said, end = "", time.monotonic() + LONG_SECONDS
    while said.count("\n") < lines and time.monotonic() < end:
        said += capfd.readouterr().err
        time.sleep(0.005)
    return said.splitlines()


@pytest.mark.usefixtures("soon")
def test_a_line_says_what_is_done_how_far_and_for_how_long(capfd):
    with Telling("counting") as counting:
        assert told(capfd, lines=2)[-1] == "penstock: counting … 0 s"
        counting.count(3, 7)
        assert "penstock: counting … 3 of 7, 0 s" in told(capfd, lines=3)
        counting.update("nearly there")
        assert "penstock: counting … nearly there, 0 s" in told(capfd, lines=3)
    capfd.readouterr()
    time.sleep(0.05)
    assert capfd.readouterr().err == ""
    assert not [one for one in threading.enumerate() if "tells of" in one.name]


def test_nothing_is_said_of_what_is_done_soon(capfd):
    with Telling("counting"):
        time.sleep(0.05)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("name", "value"), [("PENSTOCK_QUIET", "1"), ("RANK", "1")])
def test_who_asks_for_silence_gets_it(monkeypatch, capfd, name, value):
    monkeypatch.setenv(name, value)
    with Telling("counting"), show.counting("more"), show.profiling():
        time.sleep(0.1)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("soon")
def test_nobody_needs_to_listen(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with Telling("counting"):
        time.sleep(0.05)


@pytest.mark.usefixtures("soon")
def test_a_function_tells_of_itself_and_gives_what_it_gives(capfd):
    @tells("working")
    def work(lines):
        """What it does."""
        return told(capfd, lines=lines)

    assert work(1)[0] == "penstock: working … 0 s"
    assert work.__doc__ == "What it does."


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("bar", [show.counting, lambda _: show.profiling()])
def test_bars_are_lines_where_there_is_no_terminal(capfd, bar):
    with bar("profiling") as advance:
        advance(1, 2)
        assert "penstock: profiling … 1 of 2, 0 s" in told(capfd, lines=3)


@pytest.mark.usefixtures("soon")
def test_profiles_and_verbs_tell_how_far_they_are(capfd):
    model, (inputs, _) = make_mlp(), make_batch(4)
    pk.profile(model, inputs, ranks=0)
    assert "penstock: profiling … " in told(capfd)[0]
    pk.profile(model, inputs, repeats=1, ranks=0, progress=lambda done, total: None)
    assert "profiling" not in capfd.readouterr().err  # somebody else does
    workload = "tests.kit.small_workload:workload"
    result = succeed("profile", workload, "-m", 2, "--ranks", 0, "--json")
    assert pk.LayerGraph.from_json(result.stdout)
    assert "penstock: profiling … " in result.stderr
