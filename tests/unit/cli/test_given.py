"""An option that would change nothing is refused, rather than passed over."""

from __future__ import annotations

import json

import pytest

from penstock import schedules, simulate
from tests.kit.command_line import refused, run
from tests.kit.paths import ROOT

CSV = str(ROOT / "examples" / "schedule.csv")


@pytest.fixture
def step(tmp_path):
    path = tmp_path / "step.json"
    timeline = simulate(schedules.build("gpipe", num_ranks=2, num_microbatches=3))
    path.write_text(timeline.to_json())
    return str(path)


def test_a_file_says_itself_what_schedules_by_name_are_told(step):
    message = refused("draw", step, "-p", "9", "-m", "3", "--costs", "5,5,5")
    assert "leave --ranks and --microbatches and --costs out" in message
    assert "leave --costs out" in refused("simulate", step, "--costs", "2,1,1")
    assert "leave --ranks out" in refused("check", CSV, "-p", "7")
    assert "leave --microbatches out" in refused("compare", step, CSV, "-m", "4")
    assert json.loads(run("simulate", CSV, "--costs", "2,1,1", "--json"))["makespan"] == 18


@pytest.mark.parametrize("name", ["picture.txt", "picture.json", "picture.html", None])
def test_only_figures_have_a_width(tmp_path, name):
    output = () if name is None else ("-o", str(tmp_path / name))
    assert "leave --width out" in refused("draw", "1f1b", "--width", "600", *output)


def test_options_of_what_is_not_done_are_refused(tmp_path):
    fleet = tmp_path / "fleet.toml"
    message = refused("fleet", fleet, "--simulate", "--folder", "nowhere", "--every", "3")
    assert "--folder and --every" in message
    assert "leave --every out" in refused("fleet", fleet, "--every", "3")
    model = ("--cost-model", "pipedream-paper", "--overlap", "0.3")
    assert "leave --overlap out" in refused("plan", "graph.json", *model)


def test_two_pictures_do_not_go_to_one_place(tmp_path):
    """And nothing is written where one of several cannot be."""
    path = tmp_path / "same.svg"
    assert "both go to" in refused("compare", "1f1b", "-o", path, "--scatter", path)
    both = refused("compare", "1f1b", "--scatter", "-", "-o", "-")
    assert "--output and --scatter would both go to standard output" in both
    refused("compare", "1f1b", "-o", path, "--scatter", tmp_path / "points.txt")
    refused("compare", "1f1b", "-o", path, "--memory", tmp_path / "memory.svg")
    assert not path.exists()
