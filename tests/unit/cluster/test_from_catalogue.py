"""``Cluster.of``: machines of the catalogue as devices, groups and cards."""

import pytest

import penstock as pk


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("h100-nvl",), "nearest are h100"),
        (("dgx-h10",), "no device or host .dgx-h10.; the nearest are .*dgx-"),
        (("l40s",), "no host with l40s"),
    ],
)
def test_what_the_catalogue_lacks_is_refused(arguments, said):
    with pytest.raises(pk.InputError, match=said):
        pk.Cluster.of(*arguments)


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"devices_per_host": 9}, {"hosts": 1.5}])
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(pk.InputError):
        pk.Cluster.of("h100", **wrong)
