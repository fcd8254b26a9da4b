"""Activations that wait in a tier are held against forwards that run twice."""

from __future__ import annotations

import json
import re

import pytest

from penstock import Cluster, Device, Layer, LayerGraph, Plan, Tier, check, plan, replan, simulate
from penstock.base.errors import InputError
from penstock.core.schedule import Kind
from penstock.planning.plans.spilling import Offload, moved_activations

MIB = 1 << 20


def model(count=8, activation=8 * MIB):
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_seconds=0.01,
            backward_input_seconds=0.01,
            backward_weight_seconds=0.01,
            activation_bytes=activation,
            output_bytes=MIB // 4,
            parameter_bytes=MIB,
            optimizer_bytes=2 * MIB,
        )
        for index in range(count)
    )
    return LayerGraph(layers=layers, input_bytes=MIB // 4, microbatch_size=4)


def devices(*tiers, count=4):
    own = (Device(name=f"d{i}", kind="gpu") for i in range(count))
    return Cluster(devices=tuple(own), tiers=tiers)


def tier(bytes_per_second):
    speeds = {"read_bytes_per_second": bytes_per_second, "write_bytes_per_second": bytes_per_second}
    return Tier(kind="host", **speeds)


TIGHT = {"microbatches": 16, "memory_bytes": 56 * MIB, "schedule": "1f1b", "stages": 4}


def test_a_fast_tier_is_better_than_running_twice():
    before = plan(model(), devices(), **TIGHT)
    assert any(stage.recompute != "none" for stage in before.stages)
    found = plan(model(), devices(tier(4e9)), **TIGHT)
    assert found.offload is not None
    assert found.offload.stages == tuple(
        index for index, stage in enumerate(before.stages) if stage.recompute != "none"
    )
    assert all(stage.recompute == "none" for stage in found.stages)
    assert found.step_seconds < before.step_seconds
    assert max(found.rank_bytes) <= 56 * MIB
    moved = moved_activations(found.build_schedule(), found.stages)
    leaves = [op for op in found.build_schedule().where if op.kind is Kind.LEAVE_STASH]
    assert moved == len(leaves) * 2 * 8 * MIB
    assert "wait in main memory between forward and backward" in found.reason
    assert "running these forwards twice would take" in found.reason
    assert [row.label for row in found.alternatives][-1] == "forwards run twice"
    assert "wait in main memory" in str(found)
    assert found.stages[0].peak_activations < 4
    check(found.build_schedule())
    assert simulate(found.build_schedule(), found.costs).makespan <= found.step_seconds


def test_on_cpus_activations_stay_unless_asked_for():
    """Copies take time of the same cores there, of which predictions know nothing."""
    cluster = Cluster(devices=tuple(Device(name=f"d{i}") for i in range(4)), tiers=(tier(4e9),))
    found = plan(model(), cluster, **TIGHT)
    assert found.offload is None
    assert any(stage.recompute != "none" for stage in found.stages)
    assert "only plan.offloading(…) lets them leave" in found.reason


@pytest.mark.parametrize(
    ("speed", "budget", "reason"),
    [(1e8, 56, "instead would take .* a step"), (4e9, 26, "more memory than there is")],
)
def test_a_slow_tier_or_too_little_room_leaves_it_at_running_twice(speed, budget, reason):
    asked = {**TIGHT, "memory_bytes": budget * MIB}
    found = plan(model(), devices(tier(speed)), **asked)
    assert found.offload is None
    assert found.stages == plan(model(), devices(), **asked).stages
    assert re.search(reason, found.reason)


@pytest.mark.parametrize("asked", [{"spill": "never"}, {"recompute": "stage"}])
def test_nothing_leaves_where_that_is_not_asked_for(asked):
    assert plan(model(), devices(tier(4e9)), **TIGHT, **asked).offload is None


def test_it_is_a_file_and_the_tier_is_remembered_when_it_is_planned_again():
    found = plan(model(), devices(tier(4e9)), **TIGHT)
    again = Plan.from_json(found.to_json())
    assert again == found
    assert json.loads(found.to_json())["offload"]["tier"]["kind"] == "host"
    assert replan(found, devices(), memory_bytes=56 * MIB).offload == found.offload
    assert found.offloading(None).offload is None


def test_wrong_stages_and_plans_that_never_flush_are_refused():
    found = plan(model(), devices(), microbatches=16, schedule="1f1b", stages=4)
    with pytest.raises(InputError, match="there is no stage 9"):
        found.offloading(Offload(stages=(9,)))
    stream = plan(model(), devices(), microbatches=16, schedule="pipedream", stages=4)
    with pytest.raises(InputError, match="only where the pipeline drains"):
        stream.offloading(Offload())
    again = found.recomputing("stage")
    with pytest.raises(InputError, match="stage 0 keeps little"):
        Plan.from_json(again.to_json().replace('"offload": null', '"offload": {"stages": []}'))
