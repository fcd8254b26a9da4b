"""Which ranks are linked, and what users are told of the way that messages take."""

from __future__ import annotations

import pytest

from penstock.engine.transport import on_devices, processes


def place(number=0, *, kind="emu", host="here", identity=None, library="quick", problem=""):
    identity = str(number) if identity is None else identity
    return on_devices._Whereabouts(host, kind, identity, f"{kind}:{number}", library, problem)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (place(0), place(1), ""),
        (place(0), place(0, host="there"), ""),
        # Each process sees one device, which it calls the first.
        (place(0, identity="a"), place(0, identity="b"), ""),
        (place(0), place(0), "both compute on emu:0"),
        (place(0, identity="a"), place(1, identity="a"), "both compute on emu:0"),
        (place(0, kind="cpu"), place(1), "rank 2 computes on the CPU"),
        (place(0), place(1, kind="cpu"), "rank 5 computes on the CPU"),
        (place(0), place(1, kind="other"), "one is on emu:0, the other on other:1"),
        (place(0, library="", problem="there is none"), place(1), "there is none"),
    ],
)
def test_who_is_apart(first, second, why):
    assert on_devices._why_apart((2, 5), first, second) == why


def test_what_is_told():
    def told(*places):
        apart = {
            (rank, rank + 1): on_devices._why_apart((rank, rank + 1), *places[rank : rank + 2])
            for rank in range(len(places) - 1)
        }
        return on_devices._told([*places], apart)

    assert told(place(0), place(1)) == "tensors go straight from device to device by quick"
    assert told(place(0), place(0)) == (
        "tensors of accelerators go through main memory between ranks 0 and 1 (both compute on "
        "emu:0)"
    )
    assert told(place(0), place(1), place(1)) == (
        "tensors go straight from device to device by quick, but through main memory between ranks "
        "1 and 2 (both compute on emu:1)"
    )
    assert told(place(0), place(0), place(1), place(1), place(1)).endswith(
        "between ranks 0 and 1 (both compute on emu:0, 2 more pairs likewise)"
    )


@pytest.mark.parametrize(
    ("way", "hosts", "problems", "told"),
    [
        ("auto", "aa", [], "messages go through shared memory, since all ranks are on one host"),
        ("auto", "ab", [], "through the process group, since every rank is on a host of its own"),
        ("auto", "aab", [], "and through the process group between the 2 hosts"),
        ("auto", "aa", ["it is full"], "through the process group, since it is full"),
        ("shared-memory", "aa", [], "shared memory, as transport='shared-memory' says"),
        ("process-group", "ab", [], "the process group, as transport='process-group' says"),
    ],
)
def test_what_is_told_of_messages(way, hosts, problems, told):
    assert told in processes._summary(way, hosts, problems)
