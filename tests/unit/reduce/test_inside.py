"""Sums inside hosts first: the bits are those of the tree, whoever is near whom."""

from __future__ import annotations

import secrets
import threading
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.base.errors import PeerError
from penstock.core.cluster import SpareMachine
from penstock.core.summation.frames import key_of
from penstock.core.summation.server import SummationServer
from penstock.engine.reduce.delegated import ServerReducer
from penstock.engine.reduce.inside import Hosts, SliceLayout, sharing_cards
from penstock.engine.reduce.reducer import SharedWeights
from penstock.planning.plans.summing import Summing
from tests.unit.reduce.test_sums import fill, holders, in_shared_memory, on_all_ranks


@st.composite
def places(draw):
    """Levels of up to six ranks: hosts, perhaps with switches, whatever their numbers."""
    switches = draw(st.lists(st.integers(0, 4), min_size=2, max_size=6))
    hosts = draw(st.lists(st.integers(0, 2), min_size=5, max_size=5))
    levels = (tuple(switches), tuple(hosts[switch] for switch in switches))
    return levels[draw(st.integers(0, 1)) :]


@contextmanager
def reducers_of(copies, summing, num_servers=0):
    """Reducers of ranks that are threads, joined by shared memory and servers."""
    servers = [SummationServer("127.0.0.1", 0, key_of("", "job")) for _ in range(num_servers)]
    spares = tuple(
        SpareMachine(
            name=f"s{number}", bytes_per_second=1e9, address=f"127.0.0.1:{server.address[1]}"
        )
        for number, server in enumerate(servers)
    )
    summing = Summing(
        reducer="servers", levels=summing.levels, across=summing.across, servers=spares
    )
    ranks, attempt = tuple(range(len(copies))), secrets.token_hex(16)
    transports = in_shared_memory(len(copies))
    made = [
        ServerReducer(
            rank, SharedWeights(0, ranks, frozenset({0}), copies[rank]), transports[rank],
            summing, attempt, [0],
        )
        for rank in ranks
    ]  # fmt: skip
    try:
        on_all_ranks(lambda rank: made[rank].open(), len(copies))
        yield made
    finally:
        for reducer in made:
            reducer.close(failed=True)
        for server in servers:
            server.close()
        for transport in transports:
            transport.close("done")


def in_order(copies, summing, divisor=1):
    """What the tree of a plan makes of gradients, where there are any."""
    tree = summing.tree(range(len(copies)))
    sums = []
    for column in zip(*copies, strict=True):
        values = {rank: one.grad for rank, one in enumerate(column) if one.grad is not None}
        total = tree.fold(values, torch.add) if values else None
        sums.append(total / divisor if total is not None and divisor > 1 else total)
    return sums


def complete(reducers, number, *, averages=False):
    def work(rank):
        reducers[rank].hand_in(number, rank + 1)
        reducers[rank].advance(averages=averages)
        reducers[rank].finish()

    on_all_ranks(work, len(reducers))


def check(copies, expected):
    for parameters in copies:
        for parameter, wanted in zip(parameters, expected, strict=True):
            assert (parameter.grad is None) == (wanted is None)
            assert wanted is None or torch.equal(parameter.grad, wanted)


@settings(max_examples=25, deadline=None)
@given(
    levels=places(),
    num_servers=st.integers(0, 2),
    across=st.sampled_from(["every", "first"]),
    portion_bytes=st.sampled_from([400, 1 << 20]),
)
def test_sums_have_the_bits_of_the_tree(levels, num_servers, across, portion_bytes):
    summing, count = Summing(reducer="servers", levels=levels, across=across), len(levels[0])
    copies = holders(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.core.summation.split.LEAST_PORTION_BYTES", portion_bytes)
        with reducers_of(copies, summing, num_servers) as made:
            rounds = [(0.0, False), (0.5, True), (1.0, False)]
            for number, (missing, averages) in enumerate(rounds):
                fill(copies, number, missing)
                divisor = sum(range(1, count + 1)) if averages else 1
                expected = in_order(copies, summing, divisor)
                complete(made, number, averages=averages)
                check(copies, expected)


def test_gradients_leave_the_host_while_the_backward_runs(monkeypatch):
    """Two hosts of two: from the second step on, all but what others must still do has left."""
    monkeypatch.setattr("penstock.core.summation.split.LEAST_PORTION_BYTES", 4000)
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))) for _ in range(4)]
    rows = torch.randn(4, 8, 32)
    summing = Summing(reducer="servers", levels=((0, 0, 1, 1),))
    copies = [tuple(model.parameters()) for model in models]
    with reducers_of(copies, summing) as made:
        together = threading.Barrier(4)

        def backward(rank, number):
            with made[rank].closing(number):
                models[rank](rows[rank]).square().mean().backward()
                together.wait(60)
                return [made[rank]._inside.has_given(portion) for portion in range(6)]

        for number in range(3):
            for model in models:
                model.zero_grad()
            given = on_all_ranks(lambda rank, number=number: backward(rank, number), 4)
            assert {all(own) if number else any(own) for own in given} == {bool(number)}
            expected = in_order(copies, summing)
            complete(made, number)
            check(copies, expected)


def test_only_as_many_exchange_as_the_smallest_host_has():
    hosts = Hosts.of(Summing(levels=((5, 3, 3, 5, 3),)), range(6))
    assert hosts == Hosts(((0, 3), (1, 2, 4), (5,)), 1)
    assert [hosts.slice_of(rank) for rank in range(6)] == [0, 0, None, None, None, 0]
    assert hosts.exchanging_of([10, 11, 12, 13, 14, 15]) == [(10, 11, 15)]


@given(st.dictionaries(st.integers(0, 3), st.integers(0, 40)), st.integers(1, 4), st.integers(1, 8))
def test_slices_of_portions_make_the_buffers(counts, num_slices, num_portions):
    layout = SliceLayout(counts, num_slices, num_portions)
    for dtype, count in counts.items():
        ranges = [
            layout.slice(portion, own).get(dtype, (0, 0))
            for portion in range(num_portions)
            for own in range(num_slices)
        ]
        assert [place for ends in ranges for place in range(*ends)] == [*range(count)]
        for own in range(num_slices):
            inside = [layout.in_slice(p, own).get(dtype, (0, 0)) for p in range(num_portions)]
            places = [place for ends in inside for place in range(*ends)]
            assert places == [*range(layout.counts(own).get(dtype, 0))]


def test_a_card_and_a_server_are_shared_by_what_passes_them():
    spare = SpareMachine(name="s", bytes_per_second=60.0)
    summing = Summing(
        reducer="servers", servers=(spare,), levels=((0, 0, 1, 1, 1, 2),),
        bytes_per_second=(12.0,) * 6,
    )  # fmt: skip
    sums = [Hosts.of(summing, ranks) for ranks in ([0, 1, 2, 3], [4, 5])]
    shared = sharing_cards(summing, sums)
    assert shared.servers[0].bytes_per_second == 20.0  # two slices, and the other sum
    assert shared.bytes_per_second == (6.0, 6.0, 4.0, 4.0, 4.0, 12.0)
    assert sharing_cards(summing, []) == summing


def test_who_is_lost_inside_a_host_is_named():
    summing = Summing(reducer="servers", levels=((0, 0, 1),))
    copies = holders(3)
    fill(copies, 0)
    with reducers_of(copies, summing) as made:
        for rank in (0, 2):
            made[rank].hand_in(0, 1)
        made[1]._transport.close("rank 1 has had enough")
        with pytest.raises(PeerError, match=r"waiting before its update for rank 1's.*had enough"):
            made[0].advance(averages=False)
