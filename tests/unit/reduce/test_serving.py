"""Sums by holders and spare machines: as by a loop over the ranks, and early."""

from __future__ import annotations

import itertools
import secrets

import pytest
import torch
from torch import nn

from penstock.base.errors import InputError, RunError
from penstock.core.cluster import SpareMachine
from penstock.core.summation.frames import key_of
from penstock.core.summation.server import SummationServer
from penstock.engine.reduce.delegated import ServerReducer
from penstock.engine.reduce.reducer import SharedWeights
from penstock.planning.plans.summing import Summing
from tests.unit.reduce.test_sums import (
    SHAPES,
    between_threads,
    fill,
    folded,
    holders,
    on_all_ranks,
)


@pytest.fixture(name="reducers")
def fixture_reducers(monkeypatch):
    """Makes the reducers of ranks that are threads, with so many servers."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    servers = [SummationServer("127.0.0.1", 0, key_of("", "job")) for _ in range(2)]
    made = []

    def make(copies, num_servers):
        spares = tuple(
            SpareMachine(name=f"s{n}", bytes_per_second=1e9, address=f"127.0.0.1:{one.address[1]}")
            for n, one in enumerate(servers[:num_servers])
        )
        ranks, transports = tuple(range(len(copies))), between_threads(len(copies))
        attempt, summing = secrets.token_hex(16), Summing(reducer="servers", servers=spares)
        reducers = [
            ServerReducer(
                rank, SharedWeights(0, ranks, frozenset({0}), copies[rank]), transports[rank],
                summing, attempt, [0],
            )
            for rank in ranks
        ]  # fmt: skip
        made.extend(reducers)
        on_all_ranks(lambda rank: reducers[rank].open(), len(copies))
        return reducers

    yield make
    for reducer in made:
        reducer.close(failed=True)
    for server in servers:
        server.close()


def complete(reducers, number, *, averages=False):
    def work(rank):
        reducers[rank].hand_in(number, rank + 1)
        reducers[rank].advance(averages=averages)
        reducers[rank].finish()

    on_all_ranks(work, len(reducers))


@pytest.mark.parametrize(("num_ranks", "num_servers"), [(2, 0), (3, 2), (4, 1)])
def test_every_holder_has_the_bits_of_a_loop_over_the_ranks(reducers, num_ranks, num_servers):
    copies = holders(num_ranks)
    made = reducers(copies, num_servers)
    for number, (missing, averages) in enumerate(itertools.product((0.0, 0.5, 1.0), (False, True))):
        fill(copies, number, missing)
        expected = folded(copies, sum(range(1, num_ranks + 1)) if averages else 1)
        complete(made, number, averages=averages)
        for parameters in copies:
            for parameter, wanted in zip(parameters, expected, strict=True):
                if wanted is None:
                    assert parameter.grad is None
                else:
                    assert torch.equal(parameter.grad, wanted)
        for reducer in made:
            told = reducer.take_served()
            assert {one.server for one in told} == {*range(num_servers)}
            assert all(one.start < one.end for one in told)


def test_gradients_leave_when_they_have_been_made(reducers):
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for _ in range(2)]
    rows = torch.randn(2, 8, 64)
    made = reducers([tuple(model.parameters()) for model in models], 2)
    for number in range(3):
        for model in models:
            model.zero_grad()
        for model, own, reducer in zip(models, rows, made, strict=True):
            with reducer.closing(number):
                model(own).square().mean().backward()
                round_ = reducer._exchange._current
                waiting = sum(map(len, round_.waiting.values()))
            assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
            assert waiting == (0 if number else len(round_.left))  # the first one only counts
        expected = folded([tuple(model.parameters()) for model in models])
        complete(made, number)
        for model in models:
            for parameter, wanted in zip(model.parameters(), expected, strict=True):
                assert torch.equal(parameter.grad, wanted)


def test_a_gradient_that_is_made_in_steps_leaves_with_the_last_and_never_with_half(reducers):
    weight = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    made = reducers([(one,) for one in weight], 0)

    def go(number, times):
        for one, reducer in zip(weight, made, strict=True):
            one.grad = None
            with reducer.closing(number):
                for _ in range(times):
                    (2 * one).sum().backward()
        complete(made, number)

    for number in range(2):
        go(number, 2)
        assert weight[0].grad.tolist() == [8.0] * 3
    go(2, 1)  # fewer than before: it leaves when all is handed in
    assert weight[1].grad.tolist() == [4.0] * 3
    with pytest.raises(RunError, match="added to after it had left"):
        go(3, 2)


def test_a_server_elsewhere_needs_a_secret(reducers, monkeypatch):
    monkeypatch.delenv("PENSTOCK_SECRET", raising=False)
    (copies,) = holders(1)
    spare = SpareMachine(name="far", bytes_per_second=1e9, address="192.0.2.1")
    summing = Summing(reducer="servers", servers=(spare,))
    weights = SharedWeights(0, (0,), frozenset({0}), copies)
    reducer = ServerReducer(0, weights, between_threads(1)[0], summing, "00" * 16, [0])
    with pytest.raises(
        InputError, match=r"'far' at .* may be another machine, and PENSTOCK_SECRET"
    ):
        reducer.open()


def test_a_server_that_is_not_there_is_named(reducers):
    (copies,) = holders(1, SHAPES[:1])
    spare = SpareMachine(name="none", bytes_per_second=1e9, address="127.0.0.1:1")
    weights = SharedWeights(0, (0,), frozenset({0}), copies)
    summing = Summing(reducer="servers", servers=(spare,))
    reducer = ServerReducer(0, weights, between_threads(1)[0], summing, "00" * 16, [0])
    with pytest.raises(RunError, match=r"the server 'none' can't be reached at 127\.0\.0\.1:1"):
        reducer.open()
    reducer.close(failed=True)
