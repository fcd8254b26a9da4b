"""Clusters as people write them, and what measuring makes of ranks and links."""

from __future__ import annotations

import re
import tomllib
from itertools import combinations

import pytest

from penstock import Cluster, Link
from penstock.base.errors import FileError, InputError
from penstock.base.units import to_bytes, to_bytes_per_second, to_seconds
from penstock.core.cluster import Topology
from penstock.core.cluster.measured import (
    Seat,
    chosen_pairs,
    differences,
    fit,
    gathered,
    ring_seconds,
)
from tests.kit.paths import DOCS

PAGE = DOCS / "clusters.md"

SERVERS = """
link = "10Gbit/s, 50us"

[[servers]]
name = "fast"
devices = 4
memory = "16GiB"
link = "12GB/s, 5us"

[[servers]]
name = "slow"
devices = 4
memory = "16GiB"
speed = 0.6
link = "12GB/s, 5us"

[[spares]]
name = "helper"
bandwidth = "10Gbit/s"
"""


def test_two_servers_and_a_spare_machine(tmp_path):
    path = tmp_path / "cluster.TOML"
    path.write_text(SERVERS)
    cluster = Cluster.load(path)
    assert [device.name for device in cluster.devices][3:5] == ["fast:3", "slow:0"]
    assert [device.speed for device in cluster.devices] == [1.0] * 4 + [0.6] * 4
    assert {device.memory_bytes for device in cluster.devices} == {16 * 2**30}
    topology = Topology(cluster)
    inside = Link(latency_seconds=5e-6, bytes_per_second=12e9)
    assert topology.link(0, 3) == topology.link(4, 7) == inside
    assert topology.link(3, 4) == Link(latency_seconds=50e-6, bytes_per_second=1.25e9)
    assert cluster.spares[0].bytes_per_second == 1.25e9
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_counts_racks_single_devices_and_wires():
    cluster = Cluster.from_toml(
        """
        link = { latency = 1e-3, bandwidth = "1GB/s" }
        shared_memory = 100
        [[servers]]
        count = 2
        devices = 2
        shared_memory = "1KiB"
        [[servers]]
        name = "node"
        count = 2
        memory = 70
        shared_memory = 60
        [[devices]]
        name = "alone"
        speed = 2
        [[groups]]
        name = "rack"
        members = ["server0", "server1", "node1"]
        link = 5e9
        [[wires]]
        between = ["alone", "server1:1"]
        link = "7us"
        [[spares]]
        count = 2
        bandwidth = 1
        """
    )
    names = [device.name for device in cluster.devices]
    assert names == [
        *("server0:0", "server0:1", "server1:0", "server1:1", "node0", "node1", "alone"),
    ]
    assert cluster.devices[4].memory_bytes == 60
    assert cluster.devices[6].speed == 2.0
    assert [group.memory_bytes for group in cluster.groups] == [1024, 1024, 0]
    topology = Topology(cluster)
    assert topology.link(0, 1) == Link()
    assert topology.link(0, 5) == Link(bytes_per_second=5e9)
    assert topology.link(0, 4) == Link(latency_seconds=1e-3, bytes_per_second=1e9)
    assert topology.link(6, 3) == Link(latency_seconds=7e-6)
    assert topology.shared_memories[-1] == (tuple(range(7)), 100)
    assert [spare.name for spare in cluster.spares] == ["spare0", "spare1"]


def test_a_matrix_takes_the_slower_direction_of_each_pair():
    cluster = Cluster.from_toml(
        """
        [[servers]]
        name = "gpu"
        count = 3
        [matrix]
        bandwidth_unit = "GB/s"
        bandwidth = [[0, 50, 12], [49, 0, 12.5], [12, "1GB/s", 0]]
        latency_unit = "us"
        latency = [[0, 1, 2], [3, 0, 4], [2, 5, 0]]
        """
    )
    topology = Topology(cluster)
    assert topology.link(0, 1) == Link(latency_seconds=3e-6, bytes_per_second=49e9)
    assert topology.link(0, 2) == Link(latency_seconds=2e-6, bytes_per_second=12e9)
    assert topology.link(1, 2) == Link(latency_seconds=5e-6, bytes_per_second=1e9)


def test_a_matrix_may_be_about_some_devices():
    cluster = Cluster.from_toml(
        """
        [[servers]]
        name = "n"
        count = 3
        [matrix]
        between = ["n2", "n0"]
        bandwidth = [[0, 8], [8, 0]]
        latency = "1ms"
        """
    )
    (wire,) = cluster.wires
    assert wire.between == ("n2", "n0")
    assert wire.link == Link(latency_seconds=1e-3, bytes_per_second=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one device"),
        ("= 3", "Invalid"),
        ('[[servers]]\nlnik = "1GB/s"', r"unknown field `lnik` - at `\$.servers\[0\]`"),
        ('[[servers]]\nmemory = "16 gigs"', r"'16 gigs' is not a size.*\$.servers\[0\].memory"),
        ("[[servers]]\nmemory = -5", r"a size is -5.*memory"),
        ("[[servers]]\nmemory = true", "True is not a size"),
        ("[[servers]]\nmemory = 1.5", "1.5 is no whole number of bytes"),
        ('[[servers]]\ndevices = 2\nlink = "10Gb/s"', "'10Gb/s' is not a bandwidth"),
        ('[[servers]]\ndevices = 2\nlink = "1GB/s, 2GB/s"', "is not a link"),
        ('[[servers]]\ndevices = 2\nlink = "1us, 2us"', "is not a link"),
        ("[[servers]]\ndevices = 2\nlink = { speed = 1 }", "unknown field `speed`"),
        ('link = { latency = "3 parsecs" }', "'3 parsecs' is not a time"),
        ("[[servers]]\ncount = 0", r"count is 0.*\$.servers\[0\]"),
        ('[[servers]]\nlink = "1GB/s"', "between its devices, but it has one"),
        ("[[servers]]\nspeed = 0", "speed is 0"),
        ('[[servers]]\nname = "a"\n[[servers]]\nname = "a"', "'a' is the name of more than one"),
        ("[[servers]]\n[[spares]]\nbandwidth = 0", "spare machine 'spare'"),
        ("[[servers]]\n[[spares]]\nbandwidth = 1\ncount = 0", "count is 0"),
        ("[[servers]]\n[[spares]]", "missing required field `bandwidth`"),
        ("[[servers]]\ncount = 2\n[matrix]\nbandwidth = [[1]]", "write 2 rows of 2"),
        ("[[servers]]\ncount = 2\n[matrix]\nbandwidth = [[0, 0], [1, 0]]", "from 'server0' to 's"),
        (
            '[[servers]]\ncount = 2\n[matrix]\nbandwidth = [[0, 1], [1, 0]]\nbandwidth_unit = "GB"',
            "is not a bandwidth",
        ),
    ],
)
def test_what_a_file_may_not_say(tmp_path, text, message):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(FileError, match=message) as refusal:
        Cluster.load(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"devices": [{"name": "a", "memory": 5}]}', r"unknown field `memory`.*devices\[0\]"),
        ('{"devices": [{"name": "a"}], "wires": [{"between": ["a", "b"], "link": {}}]}', "no devi"),
        ('{"devices": [{"name": "a", "speed": -1}]}', r"speed is -1.*\$.devices\[0\]"),
    ],
)
def test_what_json_may_not_say(tmp_path, text, message):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        Cluster.load(path)


def test_units():
    assert to_bytes("16GiB") == to_bytes(" 16 GiB ") == 2**34
    assert to_bytes("1.5kB") == to_bytes("1.5KB") == to_bytes(1500) == 1500
    assert to_bytes_per_second("10Gbit/s") == to_bytes_per_second("10Gbps") == 1.25e9
    assert to_bytes_per_second("25GB/s") == 25e9
    assert to_seconds("50us") == to_seconds("50µs") == to_seconds("5e-2ms") == 5e-5
    for wrong in ("", "GB", "1 2GB", "-1GB", "1e999GB", None, [1]):
        with pytest.raises(InputError, match="is not a size"):
            to_bytes(wrong)


def test_every_example_of_the_page_is_a_cluster():
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        assert tomllib.loads(block)
        assert len(Cluster.from_toml(block).devices) > 1


SIZES = [256, 2**14, 2**18, 2**22]


def test_a_straight_line_is_found_again():
    link = Link(latency_seconds=1e-4, bytes_per_second=1e8)
    found = fit(SIZES, [link.seconds(size) for size in SIZES])
    assert found.link.bytes_per_second == pytest.approx(1e8)
    assert found.link.latency_seconds == pytest.approx(1e-4, rel=0.05)
    assert found.error < 0.03


def test_large_messages_decide_the_bandwidth_and_small_ones_the_latency():
    seconds = [5e-5, 6e-5, 0.9 * 2**18 / 1e8, 2**22 / 1e8]  # a buffer hides the first bytes
    found = fit(SIZES, seconds)
    assert found.link.bytes_per_second == pytest.approx(1e8, rel=0.02)
    assert found.link.latency_seconds == 5e-5
    assert 0.05 < found.error < 0.13  # the median of 5, 257, 13 and 1 %


def test_times_that_do_not_grow_have_no_bandwidth():
    assert fit([1, 100], [2.0, 1.0]).link == Link(latency_seconds=2.0)
    with pytest.raises(InputError, match="at least two sizes"):
        fit([5, 5], [1.0, 2.0])


def test_a_ring_sends_every_byte_almost_twice():
    link = Link(latency_seconds=0.25, bytes_per_second=10)
    assert ring_seconds(4, 40, link) == 2 * 3 / 4 * 40 / 10 + 2 * 3 * 0.25
    assert ring_seconds(1, 40, link) == 0


def test_pairs_are_all_or_neighbours():
    assert chosen_pairs(["x"] * 3, 3) == [(0, 1), (0, 2), (1, 2)]
    hosts = ["x", "y", "x", "z", "y", "z"]
    assert chosen_pairs(hosts, 14) == [(0, 1), (0, 2), (0, 3), (1, 3), (1, 4), (3, 5)]
    assert len(chosen_pairs(hosts, 15)) == 15
    assert chosen_pairs(["x", "y", "y"], 2) == [(0, 1), (1, 2)]


def seat(host, memory=0, shared=64):
    return Seat(host, "gpu" if memory else "cpu", memory, shared)


def rate(megabytes, microseconds=0.0):
    return Link(latency_seconds=microseconds * 1e-6, bytes_per_second=megabytes * 1e6)


def test_ranks_of_one_host_share_its_memory():
    links = {(0, 1): rate(100), (0, 2): rate(110), (1, 2): rate(500, 1)}
    cluster = gathered([seat("here boot net")] * 3, links)
    assert [device.name for device in cluster.devices] == ["cpu0", "cpu1", "cpu2"]
    assert cluster.link == Link(bytes_per_second=110e6)
    assert cluster.memory_bytes == 64
    assert not cluster.groups
    (wire,) = cluster.wires  # 100 is within 30 % of 110, 500 is not
    assert wire.between == ("cpu1", "cpu2")
    assert wire.link == rate(500, 1)


def test_hosts_become_groups():
    seats = [seat("a 1", 8), seat("b 1", 8), seat("a 1", 8), seat("b 1", 8), seat("c 1", 8)]
    near = {(0, 2): rate(1000), (1, 3): rate(2000)}
    far = {pair: rate(10, 30) for pair in [(0, 1), (0, 3), (2, 3), (1, 4)]}
    slow = {(2, 4): rate(1, 30)}
    cluster = gathered(seats, {**near, **far, **slow})
    assert [device.name for device in cluster.devices] == ["a:0", "b:0", "a:1", "b:1", "c"]
    assert {device.memory_bytes for device in cluster.devices} == {8}
    assert [(group.members, group.link, group.memory_bytes) for group in cluster.groups] == [
        (("a:0", "a:1"), rate(1000), 0),
        (("b:0", "b:1"), rate(2000), 0),
    ]
    assert cluster.link == rate(10, 30)
    assert [wire.between for wire in cluster.wires] == [("a:1", "c")]


def test_hosts_with_one_name_and_a_rank_each():
    cluster = gathered([seat("vm 1 net:1"), seat("vm 1 net:2")], {(0, 1): rate(3)})
    assert [(one.name, one.memory_bytes) for one in cluster.devices] == [("vm-0", 64), ("vm-1", 64)]
    assert not cluster.groups
    assert cluster.link == rate(3)


def test_what_was_not_measured_is_as_elsewhere():
    seats = [seat("a"), seat("a"), seat("b"), seat("b")]
    cluster = gathered(seats, {(0, 1): rate(100), (0, 2): rate(5)})
    assert [group.link for group in cluster.groups] == [rate(100), rate(100)]
    assert [group.memory_bytes for group in cluster.groups] == [64, 64]


def test_who_shares_a_card_is_a_group_with_it():
    hosts = ["a"] * 4 + ["b"] * 2 + ["c"]
    links = {pair: rate(1000) for pair in combinations(range(4), 2)} | {
        (0, 4): rate(10, 30), (1, 5): rate(10, 30), (2, 5): rate(10, 30), (0, 6): rate(10, 30),
        (4, 6): rate(10, 30),
    }  # fmt: skip
    cards = [(0, 1), (2, 3), (4, 5)]
    cluster = gathered([seat(host) for host in hosts], links, cards)
    topology = Topology(cluster)
    assert topology.cards[0] == topology.cards[1] != topology.cards[2] == topology.cards[3]
    assert topology.cards[4] == topology.cards[5] >= 0 and topology.cards[6] == -1
    assert topology.link(0, 2) == rate(1000), "both cards of a host are not on the way"
    assert topology.link(0, 4) == rate(10, 30)
    (card,) = {group.card for group in cluster.groups if group.card}
    assert card.bytes_per_second == 10e6
    assert not cluster.wires and Cluster.from_json(cluster.to_json()) == cluster


def test_what_measured_otherwise_than_a_file_says_is_told_with_both_figures():
    said = Cluster.from_toml(
        """
        [[servers]]
        name = "node"
        count = 2
        devices = 2
        link = "1GB/s"
        link_kind = "shared-memory"
        card = "100Mbit/s"
        """
    )
    links = {(0, 1): rate(1000), (2, 3): rate(1000), (0, 2): rate(12.5), (1, 3): rate(2)}
    seats = [seat("a"), seat("a"), seat("b"), seat("b")]
    alike = gathered(seats, links | {(1, 3): rate(12.5)}, [(0, 1), (2, 3)])
    assert not [*differences(alike, said, {(0, 2): rate(12.5)}, "c.toml")]
    other = gathered(seats, links, [(0, 1)])
    assert [*differences(other, said, links, "c.toml")] == [
        "a mebibyte from node0:1 to node1:1 takes 524 ms, and by c.toml 83.9 ms",
        "node1:0 and node1:1 do not share a card, unlike in c.toml",
    ]
    with pytest.raises(InputError, match=r"c\.toml has 4 devices, and 3 ranks were measured"):
        list(differences(gathered(seats[:3], {(0, 1): rate(9)}), said, {}, "c.toml"))
