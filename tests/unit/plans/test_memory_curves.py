"""What ranks hold from moment to moment: highest where the plan says, and drawn."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.core.cluster.parts import Device, Tier
from penstock.drawing import draw_memory
from penstock.planning.plans import Plan, StagePlan
from penstock.planning.plans.picture import memory_limits, memory_over_time
from penstock.planning.plans.spilling import Spill

MEBI = 1 << 20


def stage(rank, number):
    return StagePlan(
        layers=(f"layer{number}",),
        rank=rank,
        forward_seconds=0.01,
        backward_input_seconds=0.01,
        backward_weight_seconds=0.01,
        update_seconds=0.001,
        parameter_bytes=(3 + number) * MEBI,
        optimizer_bytes=2 * (3 + number) * MEBI,
        activation_bytes=(2 + number) * MEBI,
        input_bytes=MEBI,
        buffer_bytes=7,
    )


def plan_of(num_ranks=1, spill=None, schedule="spilled", **given):
    stages = tuple(stage(number % num_ranks, number) for number in range(4))
    options = {"stages_per_rank": 4 // num_ranks} if schedule == "spilled" else {}
    if schedule != "spilled":
        stages = stages[:num_ranks]
    return Plan(
        model="any",
        schedule=schedule,
        options=options,
        num_microbatches=4,
        stages=stages,
        spill=spill,
        **given,
    )


PLANS = {
    "spilled": plan_of(
        spill=Spill(tier=Tier(kind="host", read_bytes_per_second=1e9, write_bytes_per_second=1e9))
    ),
    "two ranks": plan_of(
        2,
        spill=Spill(tier=Tier(kind="host", read_bytes_per_second=1e9, write_bytes_per_second=1e9)),
    ),
    "in memory": plan_of(2, schedule="1f1b"),
    "split backwards": plan_of(2, schedule="zb-h1"),
    "asynchronous": plan_of(2, schedule="pipedream"),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_highest_point_is_what_the_plan_predicts(name):
    plan = PLANS[name]
    curves = memory_over_time(plan, plan.simulate())
    assert len(curves) == plan.num_ranks
    for curve, most in zip(curves, plan.rank_bytes, strict=True):
        times = [time for time, _ in curve]
        assert times == sorted(times)
        assert max(held for _, held in curve) == pytest.approx(most, abs=2)
        assert min(held for _, held in curve) > 0


def test_stages_that_leave_give_back_their_memory():
    (curve,) = memory_over_time(PLANS["spilled"], PLANS["spilled"].simulate())
    held = [amount for _, amount in curve]
    stays = memory_over_time(PLANS["in memory"], PLANS["in memory"].simulate())[0]
    assert min(held) < max(held) / 4
    assert min(amount for _, amount in stays) > max(amount for _, amount in stays) / 4


def test_a_timeline_of_another_plan_is_refused():
    with pytest.raises(InputError, match="1 ranks and the plan 2"):
        memory_over_time(PLANS["in memory"], PLANS["spilled"].simulate())
    with pytest.raises(InputError, match="op of stage 3 and the plan 2 stages"):
        memory_over_time(PLANS["in memory"], PLANS["two ranks"].simulate())


def test_limits_are_the_budget_or_the_devices_memory():
    tier = Tier(kind="host")
    assert memory_limits(plan_of(2, Spill(tier=tier, memory_bytes=9 * MEBI))) == (9 * MEBI,) * 2
    assert memory_limits(PLANS["in memory"]) == (None, None)
    devices = tuple(Device(name=f"d{n}", memory_bytes=n * MEBI) for n in range(2))
    assert memory_limits(replace(PLANS["in memory"], devices=devices)) == (None, MEBI)


def test_the_picture_has_a_panel_per_rank_and_the_limit(tmp_path):
    plan = PLANS["two ranks"]
    curves = memory_over_time(plan, plan.simulate())
    both = {"predicted": curves, "measured": curves}
    picture = draw_memory(both, (40 * MEBI, None), tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").read_text().strip() == picture.strip()
    assert picture.count('class="line k0"') == picture.count('class="line k1"') == 3  # and a key
    assert picture.count('class="limit"') == 2
    assert re.search(r"limit 40\N{NO-BREAK SPACE}MiB", picture)
    with pytest.raises(InputError, match=r"\.svg"):
        draw_memory(both, (None, None), tmp_path / "memory.html")
