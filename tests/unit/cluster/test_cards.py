"""Network cards that several devices share: who passes which, and files that say so."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Card, Cluster, Device, FileError, Group, InputError, Link
from penstock.core.cluster import Topology
from penstock.core.cluster.cluster import only

WIDE, NARROW = (
    Card(bytes_per_second=12.5e6, latency_seconds=1e-4),
    Card(bytes_per_second=1e6, latency_seconds=1e-6),
)
INSIDE = Link(bytes_per_second=1e9, latency_seconds=1e-6)


def hosts(*cards, copies=2, link=None):
    """A host of some devices behind each card; without one where it is ``None``."""
    names = [[f"h{number}:{index}" for index in range(copies)] for number in range(len(cards))]
    return Cluster(
        devices=tuple(Device(name=name) for own in names for name in own),
        link=Link() if link is None else link,
        groups=tuple(
            Group(name=f"h{number}", members=tuple(own), link=INSIDE, card=card)
            for number, (own, card) in enumerate(zip(names, cards, strict=True))
        ),
    )


def test_a_way_passes_the_cards_of_both_ends_and_none_inside_a_host():
    topology = Topology(hosts(WIDE, NARROW, None))
    assert topology.cards == (0, 0, 1, 1, -1, -1)
    assert topology.cards_between(0, 1) == () and topology.link(0, 1) == INSIDE
    assert topology.cards_between(0, 2) == (0, 1)
    assert topology.link(0, 2) == Link(latency_seconds=1.01e-4, bytes_per_second=1e6)
    assert topology.cards_between(4, 0) == (0,)
    assert topology.link(4, 0) == Link(latency_seconds=1e-4, bytes_per_second=12.5e6)


def test_a_link_that_is_slower_than_the_cards_counts():
    topology = Topology(hosts(WIDE, WIDE, link=Link(bytes_per_second=5, latency_seconds=1)))
    assert topology.link(0, 2) == Link(latency_seconds=1.0002, bytes_per_second=5)


@given(
    cards=st.lists(st.sampled_from([WIDE, NARROW, None]), min_size=1, max_size=4),
    num_bytes=st.sampled_from([1, 10**4, 10**8]),
    data=st.data(),
)
def test_the_slowest_link_is_that_of_the_worst_pair(cards, num_bytes, data):
    cluster = hosts(*cards, copies=data.draw(st.integers(1, 3)))
    topology, numbers = Topology(cluster), range(len(cluster.devices))
    chosen = data.draw(st.sets(st.sampled_from(numbers)))
    pairs = [topology.link(*pair).seconds(num_bytes) for pair in combinations(chosen, 2)]
    assert topology.slowest_link(chosen, num_bytes).seconds(num_bytes) == max(pairs, default=0)


def test_a_part_of_a_cluster_keeps_its_cards():
    part = only(hosts(WIDE, NARROW), [0, 3])
    assert Topology(part).link(0, 1).bytes_per_second == 1e6


def test_files_say_cards(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(
        """
        [[servers]]
        name = "node"
        count = 2
        devices = 4
        link = "12GB/s, 5us"
        link_kind = "pcie"
        card = "100Mbit/s, 20us"

        [[servers]]
        name = "alone"
        card = { bandwidth = "1Gbit/s" }
        """
    )
    cluster = Cluster.load(file)
    assert Topology(cluster).cards == (0, 0, 0, 0, 1, 1, 1, 1, 2)
    assert cluster.groups[0].card == Card(bytes_per_second=12.5e6, latency_seconds=20e-6)
    assert cluster.groups[0].kind == "pcie"
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_card_in_a_file_has_a_bandwidth():
    with pytest.raises(FileError, match="is no card; give its bandwidth"):
        Cluster.from_toml('[[servers]]\ndevices = 2\ncard = "20us"')


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_card_that_carries_nothing_is_refused(rate):
    with pytest.raises(InputError, match="bytes_per_second"):
        Card(bytes_per_second=rate)


def test_nobody_is_behind_two_cards():
    rack = Group(name="rack", members=("h0", "h1"), card=WIDE)
    cluster = hosts(WIDE, None)
    with pytest.raises(InputError, match="'h0' has a card, and so has 'rack'"):
        Cluster(devices=cluster.devices, groups=(*cluster.groups, rack))
    assert Cluster(devices=cluster.devices, groups=(*hosts(None, None).groups, rack)), (
        "the card of a rack may be its hosts' only one"
    )


def test_devices_with_cards_of_their_own_reach_their_host_without_them():
    """As GPUs that NVLink joins, each with a card beside it."""
    names = [[f"h{number}:{index}" for index in range(2)] for number in range(2)]
    cards = [
        Group(name=f"{name}/card", members=(name,), card=WIDE) for own in names for name in own
    ]
    whole = [
        Group(
            name=f"h{number}",
            members=tuple(f"{name}/card" for name in own),
            link=INSIDE,
            kind="nvlink",
        )
        for number, own in enumerate(names)
    ]
    devices = tuple(Device(name=name) for own in names for name in own)
    topology = Topology(Cluster(devices=devices, groups=(*cards, *whole)))
    assert topology.link(0, 1) == INSIDE and topology.cards_between(0, 1) == ()
    assert topology.link(0, 2).bytes_per_second == WIDE.bytes_per_second
    assert topology.slowest_link([0, 1]) == INSIDE
    assert topology.slowest_link([0, 1, 2]) == topology.link(0, 2)
    assert len({*topology.cards}) == 4 and len({*topology.hosts}) == 2
