import os
import sys
from itertools import combinations

import pytest

from penstock import Cluster, Device, Link
from penstock.base.errors import InputError
from penstock.core.cluster import Group, SpareMachine, Topology, Wire, local
from penstock.core.cluster.local import gpus
from penstock.engine.device.accelerators import accelerators
from penstock.engine.device.memory import total_bytes

SLOW, MIDDLE, FAST = (
    Link(latency_seconds=50e-6, bytes_per_second=1e9),
    Link(latency_seconds=20e-6, bytes_per_second=5e9),
    Link(latency_seconds=5e-6, bytes_per_second=50e9),
)


def devices(names):
    return tuple(Device(name=name) for name in names)


def racks():
    """Three levels whose devices are not listed in the order of the tree, one device in no group
    of the lower levels, and two wires."""
    return Cluster(
        devices=devices("aebfcgdhi"),
        link=SLOW,
        groups=(
            Group(name="r0", members=("s0", "s1"), link=MIDDLE, memory_bytes=7),
            Group(name="s0", members=("a", "b"), link=FAST, memory_bytes=3),
            Group(name="s1", members=("c", "d"), link=FAST),
            Group(name="r1", members=("s2", "i"), link=MIDDLE),
            Group(name="s2", members=("e", "f", "g"), link=FAST),
        ),
        wires=(
            Wire(between=("a", "h"), link=Link(bytes_per_second=9)),
            Wire(between=("e", "f"), link=Link(bytes_per_second=1e12)),
        ),
        memory_bytes=20,
    )


def test_a_link_takes_its_latency_and_then_its_bytes():
    assert Link().seconds(10**9) == 0
    assert Link(latency_seconds=0.5, bytes_per_second=100).seconds(200) == 2.5


def test_two_devices_talk_over_the_smallest_group_that_has_both_or_their_wire():
    cluster = racks()
    at = {device.name: index for index, device in enumerate(cluster.devices)}
    topology = Topology(cluster)

    def link(pair):
        first, second = (at[name] for name in pair)
        assert topology.link(first, second) == topology.link(second, first)
        return topology.link(first, second)

    assert link("ab") == link("cd") == link("eg") == FAST
    assert link("ac") == link("bd") == link("ei") == MIDDLE
    assert link("ae") == link("ih") == link("ch") == SLOW
    assert link("ah").bytes_per_second == 9
    assert link("ef").bytes_per_second == 1e12
    assert topology.paths[at["b"]] == (0, 1)
    assert topology.paths[at["h"]] == ()


@pytest.mark.parametrize("wires", [True, False])
@pytest.mark.parametrize("inner", [FAST, Link(bytes_per_second=2)])
def test_the_slowest_link_is_that_of_the_worst_pair(wires, inner):
    cluster = racks()
    groups = tuple(
        Group(name=group.name, members=group.members, link=inner) if group.name == "s2" else group
        for group in cluster.groups
    )
    cluster = Cluster(
        devices=cluster.devices,
        link=cluster.link,
        groups=groups,
        wires=cluster.wires if wires else (),
    )
    topology = Topology(cluster)
    for count in range(2, 6):
        for chosen in combinations(range(len(cluster.devices)), count):
            worst = max(topology.link(*pair).seconds(2**20) for pair in combinations(chosen, 2))
            assert topology.slowest_link(set(chosen)).seconds(2**20) == worst
    assert topology.slowest_link([3]) == topology.slowest_link([]) == Link()


def test_the_slowest_link_depends_on_the_size_of_the_message():
    near, far = Link(bytes_per_second=10), Link(latency_seconds=1.0)
    wires = (Wire(between=("a", "c"), link=near), Wire(between=("b", "c"), link=near))
    topology = Topology(Cluster(devices=devices("abc"), link=far, wires=wires))
    assert topology.slowest_link([0, 1, 2], 1) == far
    assert topology.slowest_link([0, 1, 2], 1000) == near


def test_shared_memories_name_their_devices():
    cluster = racks()
    shared = [
        ("".join(cluster.devices[index].name for index in held), size)
        for held, size in Topology(cluster).shared_memories
    ]
    assert shared == [("abcd", 7), ("ab", 3), ("aebfcgdhi", 20)]


def test_a_tree_of_a_thousand_devices():
    cluster = Cluster.tree(
        (8, 16, 8), (FAST, MIDDLE, SLOW), device=Device(name="", memory_bytes=5, speed=2.0)
    )
    assert len(cluster.devices) == 1024
    assert len(cluster.groups) == 128 + 8
    assert {device.memory_bytes for device in cluster.devices} == {5}
    assert {device.speed for device in cluster.devices} == {2.0}
    topology = Topology(cluster)
    assert topology.link(0, 7) == FAST
    assert topology.link(7, 8) == topology.link(0, 127) == MIDDLE
    assert topology.link(127, 128) == topology.link(0, 1023) == SLOW
    assert topology.slowest_link(range(8)) == FAST
    assert topology.slowest_link(range(1, 128)) == MIDDLE
    assert topology.slowest_link(range(1024)) == SLOW


def test_slowest_link_looks_at_groups_and_not_at_every_pair(monkeypatch):
    topology = Topology(Cluster.tree((8, 16, 8), (FAST, MIDDLE, SLOW)))
    asked = []
    monkeypatch.setattr(Topology, "link", lambda *_: asked.append(1) or Link())
    assert topology.slowest_link(range(1024)) == SLOW
    assert len(asked) < 1024


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(devices=()), "at least one device"),
        (lambda: Cluster(devices=devices("a"), memory_bytes=-1), "memory_bytes is -1"),
        (lambda: Device(name="a", memory_bytes=-1), "device 'a': memory_bytes is -1"),
        (lambda: Device(name="a", speed=0), "device 'a': speed is 0"),
        (lambda: Device(name="a", speed=float("nan")), "device 'a': speed is nan"),
        (lambda: Device(name="a", speed=float("inf")), "device 'a': speed is inf"),
        (lambda: Link(latency_seconds=-1), "Link: latency_seconds is -1"),
        (lambda: Link(bytes_per_second=float("inf")), "bytes_per_second is inf"),
        (lambda: Group(name="g", members=()), "group 'g' has no members"),
        (lambda: Group(name="g", members=("a",), memory_bytes=-2), "group 'g': memory_bytes is -2"),
        (lambda: Wire(between=("a", "a"), link=FAST), "joins 'a' with itself"),
        (lambda: SpareMachine(name="s", bytes_per_second=0), "spare machine 's': .* is 0"),
    ],
)
def test_parts_that_cannot_be(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"devices": devices("aa")}, "'a' is the name of more than one"),
        ({"groups": (Group(name="a", members=("b",)),)}, "'a' is the name of more than one"),
        ({"spares": (SpareMachine(name="b", bytes_per_second=1),)}, "'b' is the name of more"),
        ({"devices": devices(["", "b"])}, "empty name"),
        (
            {"groups": (Group(name="g", members=("a", "x")),)},
            "'g' has a member 'x', but no device or group is called that; there are a, b, c",
        ),
        ({"groups": (Group(name="g", members=("a", "a")),)}, "'a' is a member of 'g' and again"),
        (
            {"groups": (Group(name="g", members=("a",)), Group(name="h", members=("a", "b")))},
            "'a' is a member of 'g' and again of 'h'",
        ),
        ({"groups": (Group(name="g", members=("g",)),)}, "circle: 'g' in 'g'"),
        (
            {
                "groups": (
                    Group(name="f", members=("a",)),
                    Group(name="g", members=("h", "f")),
                    Group(name="h", members=("k",)),
                    Group(name="k", members=("g",)),
                )
            },
            "circle: 'g' in 'k' in 'h' in 'g'",
        ),
        ({"wires": (Wire(between=("a", "x"), link=FAST),)}, "there is no device 'x'"),
        (
            {
                "groups": (Group(name="g", members=("a", "b")),),
                "wires": (Wire(between=("g", "c"), link=FAST),),
            },
            "there is no device 'g'",
        ),
        (
            {
                "wires": (
                    Wire(between=("a", "b"), link=FAST),
                    Wire(between=("b", "a"), link=SLOW),
                )
            },
            "'a' and 'b' have more than one wire",
        ),
    ],
)
def test_parts_that_contradict_each_other(fields, message):
    with pytest.raises(InputError, match=message):
        Cluster(**{"devices": devices("abc"), **fields})


@pytest.mark.parametrize(
    ("counts", "links", "message"),
    [
        ((), (), "at least one level"),
        ((4, 2), (FAST,), "2 counts needs as many links, innermost first, not 1"),
        ((4, 0), (FAST, SLOW), "a count of a tree is 0"),
        ((2.5,), (FAST,), "a count of a tree is 2.5"),
    ],
)
def test_trees_that_cannot_be(counts, links, message):
    with pytest.raises(InputError, match=message):
        Cluster.tree(counts, links)


ANSWER = """\
0, GPU-aaaa, 81559
1, GPU-bbbb, 40960
2, GPU-cccc, [N/A]
3, GPU-dddd, 40960
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts a program called nvidia-smi before everything else, where torch is not loaded."""
    monkeypatch.setattr(local, "accelerators_of_loaded_torch", lambda: None)

    def install(text=ANSWER, code=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


def test_local_has_a_device_for_each_core_and_one_memory():
    cluster = Cluster.local(kind="cpu")
    if hasattr(os, "sched_getaffinity"):
        assert len(cluster.devices) == len(os.sched_getaffinity(0))
    assert cluster.memory_bytes > 0
    assert len(Cluster.local(3, "cpu").devices) == 3
    assert Cluster.local(2, "cpu").devices[1].name == "cpu1"
    assert cluster.link == Link()


def test_local_takes_gpus_with_their_own_memories(driver):
    driver()
    cluster = Cluster.local(kind="gpu")
    assert cluster.devices == (
        Device(name="gpu0", memory_bytes=81559 * 2**20, kind="gpu"),
        Device(name="gpu1", memory_bytes=40960 * 2**20, kind="gpu"),
        Device(name="gpu2", memory_bytes=40960 * 2**20, kind="gpu"),
    )
    assert cluster.memory_bytes == 0
    assert len(Cluster.local(2, "gpu").devices) == 2


def test_workers_are_cores_unless_gpus_are_asked_for(driver):
    driver()
    assert {device.kind for device in Cluster.local(2).devices} == {"cpu"}
    with pytest.raises(InputError, match=r"5 accelerators are asked for, but .* know of 3"):
        Cluster.local(5, "gpu")


@pytest.mark.parametrize(
    ("visible", "megabytes"),
    [("", []), ("-1", []), ("1", [40960]), ("1,0", [40960, 81559]), ("0,9,1", [81559]),
     ("GPU-d", [40960])],
)  # fmt: skip
def test_hidden_gpus_are_not_seen(driver, monkeypatch, visible, megabytes):
    driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.memory_bytes // 2**20 for gpu in gpus()] == megabytes


@pytest.mark.parametrize(("text", "code"), [(ANSWER, 9), ("No devices were found\n", 0)])
def test_where_a_driver_does_not_answer_torch_is_asked(driver, monkeypatch, text, code):
    driver(text, code)
    known = [2**30, 0]
    monkeypatch.setattr(local, "memories_known_to_torch", lambda: known)
    assert Cluster.local(kind="gpu").devices == (
        Device(name="gpu0", memory_bytes=2**30, kind="gpu"),
        Device(name="gpu1", kind="gpu"),
    )
    known.clear()
    with pytest.raises(InputError, match=r"1 accelerator is asked for, but .* know of 0"):
        Cluster.local(kind="gpu")


@pytest.mark.parametrize(
    ("count", "kind", "memories"),
    [(3, "cuda", [81559 * 2**20, 40960 * 2**20, 40960 * 2**20]), (2, "cuda", [5, 6]),
     (3, "npu", [7, 8, 9]), (2, "npu", [5, 6])],
)  # fmt: skip
def test_torch_knows_best_where_it_is_loaded(driver, monkeypatch, count, kind, memories):
    """Ranks compute on its devices: the driver's are others, or another process knows of fewer."""
    driver()
    monkeypatch.setattr(local, "accelerators_of_loaded_torch", lambda: (kind, count))
    monkeypatch.setattr(local, "memories_known_to_torch", lambda: [5, 6])
    monkeypatch.setattr(local, "memories_of_loaded_torch", lambda *_: [7, 8, 9])
    assert [device.memory_bytes for device in Cluster.local(kind="gpu").devices] == memories
    with pytest.raises(InputError, match=rf"4 accelerators are asked for, but torch .* {count}"):
        Cluster.local(4, kind="gpu")


def test_gpus_on_which_this_torch_cannot_compute_are_none(driver, monkeypatch):
    driver()
    monkeypatch.setattr(local, "accelerators_of_loaded_torch", lambda: ("", 0))
    with pytest.raises(InputError, match=r"1 accelerator is asked for, but torch knows of 0 here"):
        Cluster.local(kind="gpu")


def test_loaded_torch_tells_what_ranks_may_compute_on(monkeypatch):
    here = accelerators()
    kind = here[0].type if here else ""
    assert local.accelerators_of_loaded_torch() == (kind, len(here))
    monkeypatch.delitem(sys.modules, "torch")
    assert local.accelerators_of_loaded_torch() is None


def test_torch_is_asked_in_another_process(monkeypatch):
    """Which says what torch says in this one."""
    assert local.memories_known_to_torch() == [total_bytes(device) for device in accelerators()]
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert local.memories_known_to_torch() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "num_devices is 0"), ((2.5,), "num_devices is 2.5"), ((1, "tpu"), "kind is 'tpu'")],
)
def test_local_refuses(arguments, message):
    with pytest.raises(InputError, match=message):
        Cluster.local(*arguments)
