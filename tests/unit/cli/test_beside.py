"""``penstock compare`` sets plans and schedules beside each other on the same terms."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import schedules, simulate
from penstock.planning.plans import Plan, StagePlan
from tests.kit.command_line import refused, run, succeed


@pytest.fixture
def plan(tmp_path):
    stages = tuple(
        StagePlan(
            layers=(str(rank),),
            rank=rank,
            forward_seconds=1 + rank,
            backward_input_seconds=2,
            backward_weight_seconds=3,
            update_seconds=0.5,
        )
        for rank in range(2)
    )
    path = tmp_path / "plan.json"
    Plan(model="m", schedule="gpipe", num_microbatches=6, stages=stages).save(path)
    return str(path)


def test_a_schedule_beside_a_plan_has_its_ranks_microbatches_and_costs(plan):
    """The plan is of GPipe, so that GPipe beside it must take as long to the bit."""
    planned, named, other = json.loads(run("compare", plan, "gpipe", "1f1b", "--json"))
    assert named["num_ranks"] == 2
    assert named["makespan"] == planned["makespan"]
    assert named["bubble"] == planned["bubble"]
    assert other["peak_activations"] == [2, 1] != named["peak_activations"]


def test_what_is_given_holds_and_what_is_not_alike_is_said(plan):
    options = ("-p", "4", "--costs", "1,1,1")
    _, named = json.loads(run("compare", plan, "gpipe", *options, "--json"))
    assert named["num_ranks"] == 4 and named["makespan"] == 3 * (6 + 3)
    assert "plan.json 2 and 6, gpipe 4 and 6" in succeed("compare", plan, "gpipe", *options).stderr
    assert not succeed("compare", plan, "gpipe").stderr


def test_a_schedule_that_cannot_have_the_costs_of_a_plan_is_refused(plan):
    message = refused("compare", plan, "zb-v")
    assert "zb-v cannot have the costs of" in message and "--costs" in message


def test_seconds_that_were_measured_are_not_set_beside_units(tmp_path):
    path = tmp_path / "step.json"
    timeline = simulate(schedules.build("gpipe", num_ranks=2, num_microbatches=3))
    path.write_text(replace(timeline, source="measured").to_json())
    assert "measured in seconds" in refused("compare", path, "1f1b")
    _, other = json.loads(run("compare", path, "1f1b", "--costs", "1,1,1", "--json"))
    assert other["num_ranks"] == 2 and other["makespan"] == 3 * (3 + 1)


def test_rows_of_one_name_are_told_apart(plan, monkeypatch):
    """A plan and the schedule that it has were two rows called gpipe."""
    monkeypatch.chdir(Path(plan).parent)
    told = run("compare", "plan.json", "gpipe", "1f1b")
    assert re.findall(r"^(\S.*?)  +\d", told, re.M) == ["gpipe (plan.json)", "gpipe", "1f1b"]
    assert "gpipe (plan.json), predicted" in told
    alone = json.loads(run("compare", "plan.json", "1f1b", "--json"))
    assert [row["name"] for row in alone] == ["gpipe", "1f1b"]
