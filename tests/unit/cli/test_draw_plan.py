"""``penstock draw`` takes a plan from anything that can be read, even if only once."""

from __future__ import annotations

import os
from threading import Thread

import pytest

from penstock.plans import Plan, StagePlan
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
