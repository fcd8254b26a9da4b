"""``Cluster.of``: machines of the catalogue as devices, groups and cards."""

import pytest

import penstock as pk
from penstock.core import catalogue
from tests.kit.planning import chain


def test_a_host_with_a_card_for_each_device_has_a_group_for_each():
    cluster = pk.Cluster.of("h100-sxm", hosts=2)
    assert len(cluster.devices) == 16
    assert all(device.memory_bytes == 80 * 10**9 for device in cluster.devices)
    by_name = {group.name: group for group in cluster.groups}
    assert len(by_name["host0"].members) == 8
    assert by_name["host0"].kind == "nvlink"
    own = [group for group in cluster.groups if group.card is not None]
    assert len(own) == 16
    assert {len(group.members) for group in own} == {1}
    assert own[0].card.bytes_per_second == pytest.approx(0.77 * 50e9)


def test_one_card_is_shared_by_all_devices_of_its_host():
    cluster = pk.Cluster.of("cluster-b", hosts=3)
    assert [len(group.members) for group in cluster.groups if group.card] == [8, 8, 8]


def test_switches_are_groups_within_a_host():
    cluster = pk.Cluster.of("a100-pcie-8")
    shape = {group.name: (len(group.members), group.kind) for group in cluster.groups}
    assert shape == {
        "host0-switch0": (4, "pcie"), "host0-switch1": (4, "pcie"), "host0": (2, "pcie"),
    }  # fmt: skip
    by_name = {group.name: group for group in cluster.groups}
    inside, across = by_name["host0-switch0"].link, by_name["host0"].link
    assert inside.bytes_per_second > across.bytes_per_second


def test_some_devices_of_each_host():
    assert len(pk.Cluster.of("a100", hosts=2, devices_per_host=4).devices) == 8


def test_a_number_in_front_counts_hosts_or_devices():
    assert pk.Cluster.of("2xdgx-h100") == pk.Cluster.of("dgx-h100", hosts=2)
    assert pk.Cluster.of("16xh100-sxm") == pk.Cluster.of("h100-sxm", hosts=2)
    assert pk.Cluster.of("4 x H100") == pk.Cluster.of("h100-sxm", devices_per_host=4)


def test_a_device_without_a_host_of_its_own_says_what_is_assumed():
    cluster = pk.Cluster.of("l40s")
    assert "no host with l40s: it is assumed to be one like rtx-4090-8" in cluster.assumed
    assert cluster.hardware == "l40s"
    assert cluster.devices[0].memory_bytes == 48 * 10**9
    assert not pk.Cluster.of("h100").assumed
    plan = pk.plan(chain(), cluster, microbatches=4)
    assert cluster.assumed in plan.warnings


def test_every_host_that_a_device_names_is_in_the_catalogue():
    for entry in catalogue.devices().values():
        if entry.host or entry.assumed_host:
            assert pk.Cluster.of(entry.name).hardware in catalogue.devices()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("h100-nvl",), "nearest are h100"),
        (("dgx-h10",), "no device or host .dgx-h10.; the nearest are .*dgx-"),
        (("tpu-v4",), "no host with tpu-v4.*dgx-h100"),
        (("12xh100-sxm",), "12 do not fill hosts; take 8 or 16"),
        (("0xh100-sxm",), "number of h100-sxm"),
    ],
)
def test_what_the_catalogue_lacks_is_refused(arguments, said):
    with pytest.raises(pk.InputError, match=said):
        pk.Cluster.of(*arguments)


def test_a_count_in_the_name_and_beside_it_is_refused():
    with pytest.raises(pk.InputError, match="says itself how many"):
        pk.Cluster.of("8xh100", hosts=2)


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"devices_per_host": 9}, {"hosts": 1.5}])
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(pk.InputError):
        pk.Cluster.of("h100", **wrong)
