"""A thread transfers one thing at a time: first what is needed first, and then the rest."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from penstock.core.cluster.parts import Tier
from penstock.core.schedule.residence import PAGE
from penstock.engine.weights import tiers
from penstock.engine.weights.buffers import BufferPool, SwapGroup
from penstock.engine.weights.data_paths import DataPath
from penstock.engine.weights.movers import IOThread, Moved, at_once
from penstock.engine.weights.transfers import Transfers

SECONDS = 30


def in_pieces(name, count, told, gate=None, begun=None):
    """A transfer that tells its pieces, and may stand still behind the first one."""
    for number in range(count):
        told.append(name)
        if begun is not None and number == 0:
            begun.set()
            assert gate.wait(SECONDS)
        yield


@pytest.fixture
def thread():
    thread = IOThread("penstock-test")
    yield thread
    thread.close()


def test_what_is_more_urgent_comes_in_between_and_the_rest_goes_on(thread):
    told, gate, begun = [], threading.Event(), threading.Event()
    weights = thread.begin(in_pieces("weights", 3, told, gate, begun), needed_at=20)
    assert begun.wait(SECONDS)
    later = thread.begin(in_pieces("later", 1, told), needed_at=30)
    state = thread.begin(in_pieces("state", 2, told), needed_at=10)
    gate.set()
    for moved in (weights, later, state):
        assert moved.result(SECONDS) is None
    assert told == ["weights", "state", "state", "weights", "weights", "later"]
    (first, rest), (own,) = weights.stretches, state.stretches
    ends = [*first, *own, *rest]
    assert ends == sorted(ends)


def test_what_is_as_urgent_goes_in_order(thread):
    told, gate, begun = [], threading.Event(), threading.Event()
    moved = [thread.begin(in_pieces(0, 1, told, gate, begun))]
    moved += [thread.begin(in_pieces(number, 2, told)) for number in (1, 2, 3)]
    gate.set()
    for one in moved:
        one.result(SECONDS)
    assert told == [0, 1, 1, 2, 2, 3, 3]


def test_who_waits_for_another_transfer_holds_up_nobody(thread):
    """A stage that is still being written is read when that is done; others come meanwhile."""
    told, written = [], Moved()
    held_up = thread.begin(in_pieces("held up", 1, told), needed_at=1, behind=written)
    thread.begin(in_pieces("free", 1, told), needed_at=2).result(SECONDS)
    assert not held_up.done()
    thread.close()  # ends behind what it was given
    written.set_result(None)
    held_up.result(SECONDS)
    assert told == ["free", "held up"]


def test_errors_reach_who_waits_and_end_nobody_else(thread):
    def broken():
        yield
        raise OSError("unplugged")

    failed = thread.begin(broken())
    behind = thread.begin(in_pieces("never", 1, told := []), behind=failed)
    for moved in (failed, behind):
        with pytest.raises(OSError, match="unplugged"):
            moved.result(SECONDS)
    assert thread.begin(at_once(lambda: None)).result(SECONDS) is None
    assert told == []


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_state_overtakes_a_large_stage_and_all_bytes_are_right(tmp_path, monkeypatch, kind):
    """Of a real tier, with pieces of a page; the first read is held up until both are asked for."""
    monkeypatch.setattr(tiers, "_PIECE", PAGE)
    tier = Tier(kind=kind, folder="" if kind == "host" else str(tmp_path))
    way = DataPath.between(tier, torch.device("cpu"), SECONDS)
    transfers = Transfers(way, BufferPool(float("inf")))
    values = [torch.from_numpy(np.random.default_rng(n).random(6 * 512)) for n in range(2)]
    groups = [SwapGroup(f"part {n}", [value.clone()], n) for n, value in enumerate(values)]
    for group in groups:
        group.extent = way.space.reserve(group.whose, group.num_bytes)
        group.move_in(transfers.buffers.take(group.num_bytes, group.whose))
        transfers.let_go(group, writes=True, keeps=False)
    transfers.finish()
    transfers.take_moved()
    gate, read_piece = threading.Event(), way.space.read_piece

    def slowly(extent, start, memory):
        assert gate.wait(SECONDS)
        read_piece(extent, start, memory)

    monkeypatch.setattr(way.space, "read_piece", slowly)
    stage, state = groups
    transfers.begin(stage, needed_at=9)
    transfers.begin(state, needed_at=5)
    gate.set()
    transfers.arrive(stage)
    transfers.arrive(state)
    for group, value in zip(groups, values, strict=True):
        assert torch.equal(group.tensors[0], value)
    order = [stage for stage, _ in itertools.groupby(one[1] for one in transfers.take_moved())]
    assert order == [1, 0]  # told when they have come
    transfers.close()
