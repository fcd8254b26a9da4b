"""What allocators take besides tensors counts as memory, and stands among its parts."""

from math import ceil

import pytest

import penstock as pk
from penstock.base.errors import InputError, PlanError
from penstock.core.catalogue import UNSOURCED, device_named
from tests.kit.planning import KIB, chain, devices

WANTED = {"microbatches": 4, "schedule": "1f1b", "cuts": [4], "recompute": "never"}
MODEL = chain(8, activation_bytes=64 * KIB)


def bytes_with(slack):
    return max(pk.plan(MODEL, devices(2, allocator_slack=slack), **WANTED).rank_bytes)


def test_slack_is_a_part_of_what_a_rank_needs():
    plain = pk.plan(MODEL, devices(2), **WANTED)
    loose = pk.plan(MODEL, devices(2, allocator_slack=0.25), **WANTED)
    assert loose.rank_bytes == tuple(ceil(size * 1.25) for size in plain.rank_bytes)
    for own, other in zip(loose.memory_parts, plain.memory_parts, strict=True):
        assert (own.total, other.allocator) == (other.total + own.allocator, 0)
        assert own._replace(allocator=0) == other
    assert "allocator" in loose.text(120, details=True)
    assert "allocator" not in plain.text(120, details=True)
    assert pk.Plan.from_json(loose.to_json()).rank_bytes == loose.rank_bytes


def test_what_fits_without_slack_may_not_fit_with_it():
    limit = bytes_with(0.25)
    assert bytes_with(0.0) < limit - 1
    pk.plan(MODEL, devices(2, memory_bytes=limit, allocator_slack=0.25), **WANTED)
    pk.plan(MODEL, devices(2, memory_bytes=limit - 1), **WANTED)
    with pytest.raises(PlanError, match="no plan fits in memory"):
        pk.plan(MODEL, devices(2, memory_bytes=limit - 1, allocator_slack=0.25), **WANTED)


def test_the_catalogue_says_it_of_accelerators_and_where_it_comes_from():
    assert {device.allocator_slack for device in pk.Cluster.of("dgx-b200").devices} == {0.08}
    assert device_named("b200").slack.source != UNSOURCED
    assert device_named("h100-sxm").slack == (0.08, UNSOURCED)
    assert {device.allocator_slack for device in pk.Cluster.local(2).devices} == {0.0}


def test_a_file_says_it_and_nonsense_is_refused():
    text = '[[servers]]\nname = "s"\ndevices = 2\nallocator_slack = 0.05\n'
    text += '[[devices]]\nname = "d"\nallocator_slack = 0.1\n'
    cluster = pk.Cluster.from_toml(text)
    assert [device.allocator_slack for device in cluster.devices] == [0.05, 0.05, 0.1]
    with pytest.raises(InputError, match="allocator_slack is -1"):
        pk.Device(name="a", allocator_slack=-1)
