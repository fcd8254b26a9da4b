"""The fewest devices, the cheapest step, and what one more host would bring."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

import penstock as pk
from penstock import Cluster, Device, plan
from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Group, Link
from penstock.planning.planner import objective, what_if
from penstock.planning.planner.judged import raced
from penstock.planning.planner.objective import hosts_of
from penstock.planning.plans.spending import spending_of
from tests.kit.command_line import refused, run
from tests.kit.planning import chain, devices

MODEL = chain(12, parameter_bytes=1 << 20, activation_bytes=1 << 20)
ROOM = devices(8, memory_bytes=16 << 20)
HALF = chain(6, parameter_bytes=1 << 20, activation_bytes=1 << 20)
LITTLE_ROOM = devices(4, memory_bytes=8 << 20)


def hosts(count, size, **fields):
    """Equal servers, joined by a slower link."""
    names = [[f"h{host}:{k}" for k in range(size)] for host in range(count)]
    return Cluster(
        devices=tuple(Device(name=name, **fields) for own in names for name in own),
        groups=tuple(
            Group(name=f"h{n}", members=tuple(own), link=Link(bytes_per_second=1e10))
            for n, own in enumerate(names)
        ),
        link=Link(bytes_per_second=1e9),
    )


def test_the_fewest_devices_that_fit():
    fewest = plan(MODEL, ROOM, microbatches=8, objective="devices")
    with pytest.raises(PlanError, match="no plan fits in memory"):
        plan(MODEL, pk.Cluster(devices=ROOM.devices[: fewest.num_ranks - 1]), microbatches=8)
    assert max(fewest.rank_bytes) <= 16 << 20
    assert f"no plan that fits takes fewer devices than {fewest.num_ranks}" in fewest.reason


@pytest.mark.parametrize("within", [0.7, 1.0, 1.5])
def test_the_fewest_devices_that_are_fast_enough(within):
    fewest = plan(MODEL, ROOM, microbatches=8, objective="devices", within_seconds=within)
    assert fewest.step_seconds <= within
    less = plan(MODEL, pk.Cluster(devices=ROOM.devices[: fewest.num_ranks - 1]), microbatches=8)
    assert less.step_seconds > within


def test_of_many_devices_whole_hosts_and_then_single_devices():
    cluster = hosts(4, 4)
    model = chain(24)
    fewest = plan(model, cluster, microbatches=32, objective="devices", within_seconds=2.6)
    assert fewest.step_seconds <= 2.6 < plan(model, cluster, microbatches=32).step_seconds * 3
    assert 8 < fewest.num_ranks < 12
    fewer = objective.only(cluster, range(fewest.num_ranks - 1))
    assert plan(model, fewer, microbatches=32).step_seconds > 2.6 * 0.99


# Who wakes a search may meet a callback of the interpreter's, which nothing can leave.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("wish", ["devices", "cost"])
def test_a_search_without_time_claims_nothing_of_what_it_has_not_seen(wish):
    cluster = hosts(5, 8, memory_bytes=16 << 20)
    early = plan(MODEL, cluster, microbatches=8, objective=wish, patience_seconds=1e-9).reason
    assert "were looked at in time; others may be better" in early
    for claim in ("fewer devices than", "cost least"):
        assert claim not in early


def test_what_cannot_be_reached_says_what_can():
    with pytest.raises(
        PlanError, match=r"no plan takes 100 ms or less: the fastest on 8 devices"
    ) as e:
        plan(MODEL, ROOM, microbatches=8, objective="devices", within_seconds=0.1)
    told = re.search(r"within_seconds=([0-9.]+)", str(e.value))
    assert told
    reached = plan(MODEL, ROOM, microbatches=8, objective="devices", within_seconds=float(told[1]))
    assert reached.step_seconds <= float(told[1])
    with pytest.raises(PlanError, match="no plan fits in memory"):
        plan(MODEL, devices(8, memory_bytes=1 << 20), microbatches=8, objective="devices")


def test_parts_that_cannot_do_it_are_not_planned(monkeypatch):
    planned_sizes = []

    def watched(tasks, *others):
        planned_sizes.append({len(task.cluster.devices) for task in tasks})
        return raced(tasks, *others)

    monkeypatch.setattr(objective, "raced", watched)
    found = plan(MODEL, devices(8), microbatches=8, objective="devices", within_seconds=0.9)
    # 12 layers of 30 ms, 8 times, are 2.88 s of work: three devices cannot do it in 0.9 s.
    assert min(min(sizes) for sizes in planned_sizes) == 4
    assert found.step_seconds <= 0.9


def test_the_cheapest_by_hours_of_devices_and_by_price():
    hours = plan(HALF, LITTLE_ROOM, microbatches=8, objective="cost")
    priced = plan(HALF, LITTLE_ROOM, microbatches=8, objective="cost", price_per_hour=2.0)
    assert hours.num_ranks > 1
    assert (hours.num_ranks, hours.stages) == (priced.num_ranks, priced.stages)
    assert spending_of(priced).amount == pytest.approx(2 * spending_of(hours).amount)
    assert "device-hours a step" in hours.reason and "cost: " in str(priced)
    others = [
        plan(HALF, pk.Cluster(devices=LITTLE_ROOM.devices[:n]), microbatches=8) for n in (2, 3, 4)
    ]
    for other in others:
        assert spending_of(hours).amount <= spending_of(other).amount * 1.0001


def test_slow_devices_may_be_cheaper():
    """Twice as fast for four times the price: only who is in a hurry takes those."""
    fast = [Device(name=f"new{k}", speed=2.0, price_per_hour=4.0) for k in range(2)]
    slow = [Device(name=f"old{k}", price_per_hour=1.0) for k in range(2)]
    cluster = Cluster(devices=(*fast, *slow))
    cheapest = plan(MODEL, cluster, microbatches=8, objective="cost")
    assert {device.name[:3] for device in cheapest.devices} == {"old"}
    hurried = plan(MODEL, cluster, microbatches=8, objective="cost", within_seconds=1.2)
    assert any(device.name.startswith("new") for device in hurried.devices)
    assert hurried.step_seconds <= 1.2


def test_a_price_for_tokens():
    layers = MODEL.layers
    reads = replace(layers[0], input_shape="(4, 128) int64")
    graph = replace(MODEL, layers=(reads, *layers[1:]), microbatch_size=4)
    priced = plan(graph, ROOM, microbatches=8, price_per_hour=3.0)
    spent = spending_of(priced)
    assert spent.tokens == 8 * 4 * 128
    assert spent.amount == pytest.approx(priced.num_ranks * 3 * priced.step_seconds / 3600)
    assert f"{spent.amount / spent.tokens * 1e9:.4g}"[:4] in str(spent)
    assert "per billion tokens" in str(priced)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"within_seconds": 1.0}, "take objective='devices' or 'cost', or leave within_seconds"),
        ({"objective": "devices", "within_seconds": 0}, "within_seconds is 0, but must be > 0"),
        ({"objective": "money"}, "objective"),
        ({"objective": "cost", "price_per_hour": -1}, "price_per_hour is -1"),
        ({"objective": "devices", "rate": 2.0}, "does not go with rate: a plan for a rate has"),
        ({"objective": "cost", "placer": "reinforce"}, "does not go with placer='reinforce'"),
        ({"objective": "cost", "spill": "always"}, "does not go with spill='always'"),
    ],
)
def test_what_cannot_be_asked(request_, message):
    with pytest.raises(InputError, match=message):
        plan(MODEL, ROOM, microbatches=8, **request_)


def test_all_devices_have_a_price_or_none():
    some = (replace(ROOM.devices[0], price_per_hour=1.0), *ROOM.devices[1:])
    with pytest.raises(InputError, match="device 'd1' has no price_per_hour and others have one"):
        plan(MODEL, Cluster(devices=some), microbatches=8, objective="cost")
    with pytest.raises(InputError, match="price_per_hour is -1"):
        Device(name="a", price_per_hour=-1)


def test_prices_stand_in_a_file(tmp_path):
    text = '[[servers]]\nname = "s"\ndevices = 2\nprice_per_hour = 2.5\n'
    text += '[[devices]]\nname = "d"\nprice_per_hour = 1\n'
    cluster = Cluster.from_toml(text)
    assert [device.price_per_hour for device in cluster.devices] == [2.5, 2.5, 1.0]
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_one_more_host():
    cluster = hosts(2, 4)
    more = what_if("hosts+1", chain(24), cluster, microbatches=32)
    assert more.after.step_seconds < more.before.step_seconds
    assert more.after.num_ranks == 12
    assert {name.name for name in more.after.devices[8:]} == {f"more2:h1:{k}" for k in range(4)}
    less = what_if("hosts-1", chain(24), cluster, microbatches=32)
    assert less.after.num_ranks == 4
    with pytest.raises(InputError, match="hosts-2 leaves nothing"):
        what_if("hosts-2", chain(24), cluster, microbatches=32)


def test_one_more_host_of_the_catalogue_has_cards_of_its_own():
    cluster = Cluster.of("dgx-h100", hosts=1)
    assert [len(host) for host in hosts_of(cluster)] == [8]
    more = what_if("hosts+1", chain(16), cluster, microbatches=32)
    assert more.after.num_seats == 16
    assert len({*more.after.hosts}) == 2


def test_one_more_device_costs_more():
    few = devices(3, price_per_hour=1.0)
    rows = what_if("devices+1", chain(24), few, microbatches=16).rows()
    name, before, after, change = rows[-1]
    assert name == "cost" and "a step" in before and "a step" in after and change.endswith("%")


def test_the_command_line_asks_the_same(tmp_path):
    HALF.save(tmp_path / "g.json")
    LITTLE_ROOM.save(tmp_path / "c.json")
    words = ("plan", str(tmp_path / "g.json"), str(tmp_path / "c.json"), "-m", "8")
    shown = run(*words, "--objective", "devices", "--within", "1")
    assert "takes 1 s or less" in " ".join(shown.split())
    shown = run(*words, "--objective", "cost", "--price-per-hour", "2")
    assert "cost least, 0.00" in shown and "cost: 0.00" in shown
    assert "hosts+1" in run(*words, "--what-if", "hosts+1")
    assert "no plan takes 100 ms" in refused(*words, "--objective", "devices", "--within", "0.1")
