"""``penstock draw`` takes a plan from anything that can be read, even if only once."""

from __future__ import annotations

import os
from threading import Thread

import pytest

import penstock as pk
from penstock.base.errors import InputError
from penstock.planning.plans import Plan, StagePlan
from tests.kit.command_line import run


def drawn(path, *more):
    return run("draw", path, *more)


def two_stages(schedule):
    stages = tuple(
        StagePlan(layers=(str(rank),), rank=rank, forward_seconds=1, backward_input_seconds=2)
        for rank in range(2)
    )
    return Plan(model="m", schedule=schedule, num_microbatches=2, stages=stages)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("more", [(), ("--versions",)])
def test_a_plan_is_read_once(tmp_path, schedule, more):
    plan, pipe = tmp_path / "file.json", tmp_path / "pipe.json"
    two_stages(schedule).save(plan)
    os.mkfifo(pipe)

    def write_once():
        with pipe.open("wb") as sink:
            pipe.unlink()  # whoever opens it again finds nothing
            sink.write(plan.read_bytes())

    writer = Thread(target=write_once, daemon=True)
    writer.start()
    assert drawn(pipe, *more) == drawn(plan, *more)
    writer.join(timeout=10)


def test_a_policy_that_is_asked_for_is_in_the_picture_too(tmp_path):
    plan = tmp_path / "plan.json"
    two_stages("pipedream").save(plan)
    asked = drawn(plan, "--policy", "vertical-sync")
    assert "vertical-sync" in asked
    assert "vertical-sync" not in drawn(plan, "--versions")


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream-2bw", "partime"])
@pytest.mark.parametrize("suffix", [".svg", ".txt", ".html", ".json"])
def test_a_plan_is_drawn_from_python_as_on_the_command_line(tmp_path, schedule, suffix):
    """It was refused: "the timeline is of type Plan"."""
    plan = two_stages(schedule)
    plan.save(tmp_path / "plan.json")
    here, there = tmp_path / f"here{suffix}", tmp_path / f"there{suffix}"
    run("draw", tmp_path / "plan.json", "-o", there)
    picture = pk.draw(plan, here)
    assert here.read_text() == there.read_text() == picture.rstrip("\n") + "\n"
    assert picture._repr_html_() == plan._repr_html_()
    assert pk.draw(plan) == pk.draw(plan, tmp_path / "plan.txt")


def test_what_cannot_be_drawn_says_what_can():
    with pytest.raises(
        InputError, match=r"of type int; make one with penstock.simulate, or give a"
    ):
        pk.draw(3)
    with pytest.raises(InputError, match="is the class Plan; make"):
        pk.draw(Plan)
