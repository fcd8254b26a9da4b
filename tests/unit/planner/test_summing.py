"""Which way to sum the planner takes, and what it counts for it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import penstock as pk
from penstock.base.errors import InputError
from penstock.core.cluster import Group, Link, SpareMachine
from penstock.core.summation.split import best_split
from penstock.planning.plans.explanation import explain
from tests.kit.planning import chain, devices, in_one_line

RATE = 12.5e6


def cluster(num_devices, num_spares, rate=RATE, **fields):
    spares = tuple(SpareMachine(name=f"spare{n}", bytes_per_second=rate) for n in range(num_spares))
    link = Link(bytes_per_second=rate)
    return replace(devices(num_devices, **fields), link=link, spares=spares)


def graph(**fields):
    return chain(4, parameter_bytes=2_000_000, optimizer_bytes=4_000_000, **fields)


def copies(there, reducer, **request):
    return pk.plan(
        graph(), there, microbatches=len(there.devices), replicas=(len(there.devices),),
        reducer=reducer, **request,
    )  # fmt: skip


@pytest.mark.parametrize(("n", "k"), [(3, 1), (4, 2), (4, 4)])
def test_servers_are_counted_as_the_split_says(n, k):
    plan = copies(cluster(n, k), "servers")
    split = best_split(8e6, [RATE] * n, [RATE] * k)
    assert split.seconds < plan.stages[0].reduce_seconds < 1.12 * split.seconds
    assert plan.stages[0].sum_bytes == 3 * plan.stages[0].parameter_bytes
    assert plan.summing.reducer == "servers"
    assert [server.name for server in plan.summing.servers] == [f"spare{j}" for j in range(k)]
    assert plan.summing.bytes_per_second == (RATE,) * n


def test_shards_have_their_share_of_the_optimizer():
    usual, sharded = copies(cluster(4, 0), "owners"), copies(cluster(4, 0), "sharded")
    assert sharded.stages[0].optimizer_bytes * 4 == usual.stages[0].optimizer_bytes
    assert sharded.stages[0].reduce_seconds == usual.stages[0].reduce_seconds
    assert max(sharded.rank_bytes) < max(usual.rank_bytes)


def test_any_takes_the_fastest_and_says_why():
    there = cluster(4, 3)
    plan = copies(there, "any")
    assert plan.summing.reducer == "servers"
    assert "gradients summed by owners it would take" in plan.reason
    ways = ("owners", "sharded", "servers", "parameter-server")
    each = [copies(there, way).step_seconds for way in ways]
    assert plan.step_seconds == pytest.approx(min(each))
    assert copies(cluster(4, 0), "any").summing.reducer != "servers"


@pytest.mark.parametrize(("n", "k", "share"), [(4, 1, 4), (4, 2, 2), (3, 4, 1)])
def test_parameter_servers_take_gradients_and_give_weights(n, k, share):
    plan = copies(cluster(n, k), "parameter-server")
    stage = plan.stages[0]
    way = share * stage.parameter_bytes / RATE
    assert stage.reduce_seconds == pytest.approx(2 * way)
    assert stage.reduce_steps == pytest.approx((way, way)), "there and back, bucket by bucket"
    # Both directions are busy at once, so it takes little longer than one way.
    exchange = stage.exchange
    parts, each = exchange.num_parts, exchange.seconds[0]
    assert sum(exchange.seconds) + (parts - 1) * each == pytest.approx((1 + 1 / parts) * way)
    assert stage.optimizer_bytes == 0
    chosen = next(other for other in plan.alternatives if other.remark == "chosen")
    assert chosen.moved_bytes == 2 * n * stage.parameter_bytes
    assert [server.name for server in plan.summing.servers] == [f"spare{j}" for j in range(k)]
    assert max(plan.rank_bytes) < max(copies(cluster(n, k), "sharded").rank_bytes)


@pytest.mark.parametrize("reducer", ["servers", "parameter-server"])
def test_tensor_ranks_share_the_links_of_servers(reducer):
    """Two tensor ranks of a copy that repeat all layers are two copies, as far as links go."""
    there = cluster(6, 1)
    groups = pk.plan(graph(), there, microbatches=3, replicas=(3,), tensor_ranks=2, reducer=reducer)
    assert {*groups.stages[0].splits.values()} == {"whole"}
    half = replace(there, spares=(replace(there.spares[0], bytes_per_second=RATE / 2),))
    alone = pk.plan(graph(), half, microbatches=3, replicas=(3,), reducer=reducer)
    stage, other = groups.stages[0], alone.stages[0]
    assert stage.parameter_bytes == other.parameter_bytes
    assert stage.reduce_seconds == pytest.approx(other.reduce_seconds)


def test_updates_may_be_planned_to_be_late():
    late = copies(cluster(4, 2), "parameter-server", stale=3)
    assert (late.summing.stale, len(late.summing.servers)) == (3, 1)
    assert "gradients: 1 parameter server, up to 3 updates late" in in_one_line(late)
    told = explain(late)
    assert told.summary.startswith("Stale-synchronous")
    assert "late by 3 updates at most" in told.summary
    assert [stage.delay for stage in told.stages] == [3]
    assert [other.delay for other in late.alternatives if other.remark == "chosen"] == [3]
    assert pk.replan(late, cluster(3, 1), graph()).num_ranks == 3
    with pytest.raises(InputError, match="how much optimizer state there is; give"):
        pk.replan(late, cluster(3, 1))
    with pytest.raises(InputError, match="stale=2 is for reducer='parameter-server'"):
        copies(cluster(4, 2), "servers", stale=2)


def test_what_fits_only_in_shards_is_found():
    usual, sharded = (max(copies(cluster(4, 0), way).rank_bytes) for way in ("owners", "sharded"))
    limit = (usual + sharded) // 2
    assert copies(cluster(4, 0), "any", memory_bytes=limit).summing.reducer == "sharded"
    with pytest.raises(pk.errors.PlanError):
        copies(cluster(4, 0), "owners", memory_bytes=limit)


def test_the_default_and_plans_without_copies_are_as_they_were():
    there = cluster(4, 2)
    plan = pk.plan(graph(), there, microbatches=4)
    assert plan.summing == pk.plan(graph(), replace(there, spares=()), microbatches=4).summing
    assert plan.summing.reducer == "owners"
    straight = pk.plan(graph(), there, microbatches=8, schedule="gpipe", stages=4, reducer="any")
    assert straight.summing.reducer == "owners"


def test_replanning_keeps_the_way_where_it_can():
    served = copies(cluster(4, 2), "servers")
    fewer = [pk.replan(served, cluster(3, spares), graph()).num_ranks for spares in (0, 2)]
    assert fewer == [3, 3]
    assert str(served).startswith("1f1b: 1 stage on 4 ranks, 4 microbatches, gradients: 2 servers")
    sharded = copies(cluster(4, 0), "sharded")
    again = pk.replan(sharded, cluster(2, 0))
    whole = sum(stage.optimizer_bytes for stage in again.stages)
    assert whole == 4 * sharded.stages[0].optimizer_bytes


def test_servers_that_are_not_there_are_refused():
    with pytest.raises(InputError, match=r"has none; give it \[\[spares\]\]"):
        copies(cluster(4, 0), "servers")
    with pytest.raises(InputError, match="reducer"):
        copies(cluster(4, 0), "ring")


def test_rows_of_weights_save_memory_and_are_priced():
    plan, sharded = (copies(cluster(4, 0), way) for way in ("fully-sharded", "sharded"))
    stage, other = plan.stages[0], sharded.stages[0]
    largest = max(layer.parameter_bytes for layer in graph().layers)
    assert plan.summing.reducer == "fully-sharded" and not plan.summing.levels
    assert stage.optimizer_bytes == other.optimizer_bytes
    assert stage.sum_bytes == 2 * largest
    assert stage.weight_bytes == stage.parameter_bytes * 5 // 4, "rows, and all while they compute"
    assert stage.reduce_parts == 1 and stage.exchange is None, "what hides is counted already"
    hidden = sum(layer.forward_seconds for layer in graph().layers[:-1])
    assert stage.reduce_seconds == pytest.approx(other.reduce_seconds - hidden)
    again = pk.replan(plan, cluster(2, 0))
    assert again.stages[0].optimizer_bytes == 2 * stage.optimizer_bytes
    with pytest.raises(InputError, match="gathers whole layers, of which tensor ranks have parts"):
        copies(cluster(4, 0), "fully-sharded", tensor_ranks=2)


def test_weights_that_are_freed_behind_each_use_are_gathered_for_each_pass():
    step = copies(cluster(4, 0), "fully-sharded").stages[0]
    use = copies(cluster(4, 0), "fully-sharded", gathered_for="use").stages[0]
    largest = max(layer.parameter_bytes for layer in graph().layers)
    assert use.weight_bytes == use.parameter_bytes // 4 + 2 * largest
    # An exchange of gradients is two halves; the second one, weights, now comes with each pass.
    # While a layer computes, the next one's weights come, and the sums of the one before.
    half = copies(cluster(4, 0), "sharded").stages[0].reduce_seconds / 2
    ahead = half - sum(layer.forward_seconds for layer in graph().layers[:-1])
    back = half - sum(layer.backward_seconds for layer in graph().layers[:-1])
    assert min(ahead, back) > 0
    assert use.forward_seconds - step.forward_seconds == pytest.approx(ahead)
    assert use.backward_input_seconds - step.backward_input_seconds == pytest.approx(back)
    assert use.reduce_seconds == pytest.approx(back)
    on_cores = replace(cluster(4, 0), memory_bytes=2**40)
    use = copies(on_cores, "fully-sharded", gathered_for="use").stages[0]
    assert use.reduce_seconds == pytest.approx(half), (
        "cores that exchange compute nothing meanwhile"
    )
    with pytest.raises(InputError, match="is for reducer='fully-sharded'"):
        copies(cluster(4, 0), "sharded", gathered_for="use")


def test_shards_inside_hosts_are_gathered_there_and_held_by_fewer():
    inside = Link(bytes_per_second=100 * RATE)
    there = cluster(4, 0)
    names = [device.name for device in there.devices]
    groups = tuple(
        Group(name=name, members=tuple(members), link=inside, kind="shared-memory")
        for name, members in (("left", names[:2]), ("right", names[2:]))
    )
    there = replace(there, groups=groups)
    flat = copies(there, "fully-sharded", gathered_for="use")
    hybrid = copies(there, "fully-sharded", gathered_for="use", hybrid=True)
    assert (flat.summing.levels, hybrid.summing.levels) == ((), ((0, 0, 1, 1),))
    stage, other = hybrid.stages[0], flat.stages[0]
    assert stage.optimizer_bytes == 2 * other.optimizer_bytes
    assert stage.weight_bytes - other.weight_bytes == stage.parameter_bytes // 4
    assert stage.forward_seconds < other.forward_seconds, "nothing passes between hosts"
    edited = flat.edited(summing=hybrid.summing)
    assert edited.memory_parts == hybrid.memory_parts
    again = pk.replan(hybrid, cluster(4, 0))
    assert sum(own.optimizer_bytes for own in again.stages) == 2 * stage.optimizer_bytes
    with pytest.raises(InputError, match="does not say which devices share one"):
        copies(cluster(4, 0), "fully-sharded", hybrid=True)
    with pytest.raises(InputError, match="hybrid=True is for reducer='fully-sharded'"):
        copies(there, "sharded", hybrid=True)
