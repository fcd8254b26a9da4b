"""Plans whose stages come from a tier: when there is one, how many stages, and what is said."""

from __future__ import annotations

import itertools
import json
import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock import Cluster, Device, Layer, LayerGraph, Plan, Tier, plan, replan
from penstock.base.errors import FileError, InputError, PlanError
from penstock.core.schedule.op import FETCHES, LEAVES, Kind, Op
from penstock.planning.planner.spilling import _counts, _even_cuts
from penstock.planning.planner.task import Task
from penstock.planning.plans.seconds import seconds_of_ranks
from penstock.planning.plans.spilling import bytes_of_spilled_ranks, traffic, with_residence
from tests.kit.command_line import run
from tests.kit.examples import examples

MIB = 1 << 20
DISK = Tier(folder="/scratch", read_bytes_per_second=1e9, write_bytes_per_second=2e9)


def model(*weights, activation=MIB // 8, seconds=0.01):
    """Layers with so many MiB of weights, and twice as much of optimizer state."""
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_seconds=seconds,
            backward_input_seconds=seconds,
            backward_weight_seconds=seconds,
            update_seconds=seconds / 10,
            activation_bytes=activation,
            output_bytes=activation // 4,
            parameter_bytes=weight * MIB,
            optimizer_bytes=2 * weight * MIB,
        )
        for index, weight in enumerate(weights)
    )
    return LayerGraph(layers=layers, input_bytes=activation // 4, microbatch_size=4)


def one_device(*tiers):
    return Cluster(devices=(Device(name="cpu0"),), tiers=tiers)


def test_what_fits_stays():
    found = plan(model(*[4] * 8), one_device(DISK), microbatches=4, memory_bytes=1000 * MIB)
    assert found.spill is None


def test_what_does_not_fit_comes_and_goes():
    graph = model(*[4] * 8)
    found = plan(graph, one_device(DISK), microbatches=4, memory_bytes=60 * MIB)
    assert found.spill is not None and found.spill.tier == DISK
    assert found.schedule == "spilled"
    assert max(found.rank_bytes) <= 60 * MIB < 8 * 4 * 4 * MIB
    assert Plan.from_json(found.to_json()) == found
    assert "come from disk (/scratch) and leave again" in found.reason
    assert "hides behind compute from about " in found.reason
    assert "a minibatch on (this one has 16)" in found.reason
    read, written = traffic(found.stages, 4)
    weights = [stage.parameter_bytes for stage in found.stages]
    assert read == 2 * sum(weights) + 64 * MIB - weights[0] - weights[-1]
    assert written == 96 * MIB


def test_less_memory_makes_more_stages():
    graph = model(*[4] * 12)
    counts = [
        len(plan(graph, one_device(DISK), microbatches=4, memory_bytes=budget * MIB).stages)
        for budget in (150, 100, 60)
    ]
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_forwards_run_twice_only_where_activations_do_not_fit():
    light = model(*[4] * 8, activation=MIB // 8)
    heavy = model(*[4] * 8, activation=3 * MIB)
    found = [
        plan(graph, one_device(DISK), microbatches=4, memory_bytes=80 * MIB)
        for graph in (light, heavy)
    ]
    ways = [{stage.recompute for stage in one.stages[:-1]} for one in found]
    assert ways == [{"none"}, {"stage"}]
    assert max(found[1].rank_bytes) <= 80 * MIB


def test_with_more_memory_fewer_forwards_run_twice():
    graph, found, shares = model(*[4] * 8, activation=3 * MIB), [], []
    for budget in (60, 100, 140, 200):
        limits = {"memory_bytes": budget * MIB, "spill": "always"}
        found.append(plan(graph, one_device(DISK), microbatches=4, **limits))
        ways = [stage.recompute for stage in found[-1].stages]
        once = ways.count("none")
        assert ways == ["stage"] * (len(ways) - once) + ["none"] * once
        assert max(found[-1].rank_bytes) <= budget * MIB
        if 1 < once < len(ways):
            assert f"forwards of the first {len(ways) - once} stage" in found[-1].reason
        shares.append(sum(len(own.layers) for own in found[-1].stages if own.recompute != "none"))
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    seconds = [one.step_seconds for one in found]
    assert seconds == sorted(seconds, reverse=True)


def test_passes_lose_what_moving_and_new_pages_cost_and_updates_only_their_pages():
    """With a tier that takes no time, so that the step is what is computed."""
    graph, most = model(*[4] * 8, activation=3 * MIB), 4
    limits = {"microbatches": most, "memory_bytes": 80 * MIB, "spill": "always"}
    free = plan(graph, one_device(Tier(kind="host")), **limits)
    speeds = {"moved_bytes_per_second": 1e9, "new_bytes_per_second": 4e9}
    beside = replace(free, spill=replace(free.spill, moved_bytes_per_second=1e9))
    lost, costs = replace(free, spill=replace(free.spill, **speeds)).costs, beside.costs
    weights, twice = 32 * MIB, [stage.recompute == "stage" for stage in free.stages]
    assert any(twice) and not all(twice)
    assert beside.step_seconds - free.step_seconds == pytest.approx(7 * weights / 1e9)
    for index, stage in enumerate(free.stages):
        op, kept = partial(Op, index, microbatch=0), stage.kept_bytes / 4e9
        own = {kind: costs.duration(op(kind)) - free.costs.duration(op(kind)) for kind in PASSES}
        assert own[Kind.UPDATE] == 0
        assert own[Kind.FORWARD] == pytest.approx(stage.parameter_bytes / most / 1e9)
        back = own[Kind.BACKWARD] + own[Kind.RECOMPUTE]
        assert back == pytest.approx(6 * stage.parameter_bytes / most / 1e9)
        assert (own[Kind.RECOMPUTE] > 0) is twice[index]
        new = {kind: lost.duration(op(kind)) - costs.duration(op(kind)) for kind in PASSES}
        assert new[Kind.UPDATE] == pytest.approx(2 * stage.parameter_bytes / 4e9)
        makes = Kind.RECOMPUTE if twice[index] else Kind.FORWARD
        assert {kind for kind in PASSES if new[kind] > 1e-12} == {makes, Kind.UPDATE}
        assert new[makes] == pytest.approx(kept)
    (parts,) = seconds_of_ranks(beside)
    assert parts.tiers == pytest.approx(7 * weights / 1e9)
    assert parts.bubble == pytest.approx(0, abs=1e-9)


PASSES = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.UPDATE)


def test_a_slow_disk_is_waited_for_and_a_fast_one_is_not():
    graph, budget = model(*[4] * 8), {"microbatches": 4, "memory_bytes": 60 * MIB}
    slow = Tier(folder="/slow", read_bytes_per_second=3e7, write_bytes_per_second=3e7)
    times = [plan(graph, one_device(tier), **budget).step_seconds for tier in (DISK, slow)]
    compute = 8 * 4 * 0.03 + 8 * 0.001
    assert times[0] == pytest.approx(compute, rel=0.1)
    assert times[1] > 2 * compute
    # Of several, the fastest is taken.
    assert plan(graph, one_device(slow, DISK), **budget).spill.tier == DISK


def test_without_a_tier_it_is_offered():
    with pytest.raises(PlanError, match=r"or give the cluster a tier.* stages that come and go"):
        plan(model(*[4] * 8), one_device(), microbatches=4, memory_bytes=60 * MIB)
    with pytest.raises(PlanError, match="no plan fits") as refused:
        plan(
            model(*[4] * 8),
            one_device(DISK),
            microbatches=4,
            memory_bytes=60 * MIB,
            spill="never",
        )
    assert "tier" not in str(refused.value)


def test_always_is_always_and_needs_a_tier():
    graph = model(*[4] * 4)
    found = plan(graph, one_device(DISK), microbatches=4, spill="always")
    assert found.spill is not None and len(found.stages) > 1
    with pytest.raises(PlanError, match="needs a tier"):
        plan(graph, one_device(), microbatches=4, spill="always")
    with pytest.raises(InputError, match="leave out schedule"):
        plan(graph, one_device(DISK), microbatches=4, spill="always", stages=2)


def test_a_layer_that_is_too_large_alone_is_named_with_the_least_budget():
    graph = model(2, 2, 40, 2, 2)
    with pytest.raises(PlanError, match=r"layer 'layer2' alone needs 160 MiB.*83%") as refused:
        plan(graph, one_device(DISK), microbatches=4, memory_bytes=100 * MIB)
    least = float(str(refused.value).split("the least budget is ")[1].split(" MiB")[0])
    found = plan(graph, one_device(DISK), microbatches=4, memory_bytes=round((least + 1) * MIB))
    assert found.spill is not None


def test_two_devices_share_the_stages():
    cluster = Cluster(devices=(Device(name="a"), Device(name="b")), tiers=(DISK,))
    found = plan(model(*[4] * 12), cluster, microbatches=4, memory_bytes=60 * MIB)
    assert found.num_ranks == 2 and max(found.rank_bytes) <= 60 * MIB
    alone = plan(model(*[4] * 12), one_device(DISK), microbatches=4, memory_bytes=60 * MIB)
    assert found.step_seconds < alone.step_seconds


def test_clipping_leaves_room_in_what_is_planned():
    """Gradients that leave before the update are planned for where somebody asks for it."""
    found = plan(model(*[4] * 8), one_device(DISK), microbatches=4, memory_bytes=60 * MIB)
    lowered = with_residence(found.build_schedule(), found.spill, agrees=True)
    kinds = [op.kind for op in lowered.ranks[0]]
    assert sum(kind in FETCHES for kind in kinds) == sum(kind in LEAVES for kind in kinds)
    assert bytes_of_spilled_ranks(found.stages, found.build_schedule(), found.spill)


@examples(50)
@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=7), data=st.data())
def test_cuts_make_the_largest_stage_as_small_as_can_be(weights, data):
    task = Task(model(*weights), one_device(), 1)
    count = data.draw(st.integers(1, len(weights)))
    cuts = _even_cuts(task, count)
    assert len(cuts) == count + 1 and sorted(set(cuts)) == list(cuts)

    def largest(bounds):
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

    every = itertools.combinations(range(1, len(weights)), count - 1)
    assert largest(cuts) == min(largest((0, *inner, len(weights))) for inner in every)


@given(most=st.integers(1, 500))
def test_counts_reach_from_one_to_all(most):
    counts = _counts(most)
    assert counts[0] == 1 and counts[-1] == most
    assert counts == sorted(set(counts)) and len(counts) <= 50


def test_the_command_line_measures_a_tier(tmp_path):
    path = tmp_path / "graph.json"
    model(*[4] * 8).save(path)
    output = tmp_path / "plan.json"
    arguments = ["plan", path, "-m", "4", "-p", "1", "--memory", "60MiB", "--tier", tmp_path]
    told = run(*arguments, "-o", output, "--json")
    assert json.loads(told[told.index("{") :])["spill"]["tier"]["read_bytes_per_second"] > 0
    assert Plan.load(output).spill.tier.folder == str(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["graph.json", "plan.json"]


def test_a_tier_as_people_write_it(tmp_path):
    text = '[[devices]]\nname = "a"\n[[tiers]]\nfolder = "/fast"\nread = "3GB/s"\nwrite = "2GB/s"\n'
    (tier,) = Cluster.from_toml(text).tiers
    assert tier == Tier(folder="/fast", read_bytes_per_second=3e9, write_bytes_per_second=2e9)
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    assert re.search(r"disk \(/fast\) +3\S* GB/s +2\S* GB/s", run("cluster", path))


def test_a_plan_for_other_devices_keeps_its_tier_and_its_budget():
    first = plan(model(*[4] * 12), one_device(DISK), microbatches=4, memory_bytes=60 * MIB)
    two = Cluster(devices=(Device(name="a"), Device(name="b")))
    again = replan(first, two)
    assert again.spill == first.spill and again.num_ranks == 2
    assert (again.model, again.microbatch_size) == (first.model, first.microbatch_size)
    assert replan(first, two, memory_bytes=1000 * MIB).spill is None


def test_a_folder_that_cannot_be_measured(tmp_path):
    with pytest.raises(FileError, match="cannot measure the tier"):
        Cluster.local(1, tiers=[Tier(folder=str(tmp_path / "absent"))])
    with pytest.raises(InputError, match="tiers"):
        Cluster.local(1, tiers="/scratch")
