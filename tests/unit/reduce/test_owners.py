"""Sums by owners between processes: buckets leave while backwards run, with the bits of a loop."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from penstock.core.summation import split as portions_module
from penstock.engine.model import tree
from penstock.engine.reduce.buckets import buckets_of, row_buckets_of
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.reduce.reducer import Purpose, SharedWeights
from penstock.engine.reduce.sharding import ShardedReducer
from penstock.engine.reduce.sums import GradientSums
from penstock.engine.transport.base import OnTop
from tests.unit.reduce.test_sums import folded, in_shared_memory, on_all_ranks

NUM_RANKS = 3
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)


@example(shapes=[(), (1, 0)], num_owners=2, most=1, rows=True)
@given(shapes=SHAPES, num_owners=st.integers(1, 4), most=st.integers(1, 5), rows=st.booleans())
def test_buckets_have_every_number_once_and_the_last_parameters_first(
    shapes, num_owners, most, rows
):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portions_module, "LEAST_PORTION_BYTES", 16)
        buckets = (
            row_buckets_of(parameters, dict.fromkeys(range(num_owners), 1), most)
            if rows
            else buckets_of(dict(enumerate(parameters)), dict.fromkeys(range(num_owners), 1), most)
        )
    assert 1 <= len(buckets) <= most
    owned = [torch.zeros(parameter.numel()) for parameter in parameters]
    for bucket in buckets:
        assert [owner for owner, _ in bucket.shards] == [*range(num_owners)]
        pieces = [piece for _, own in bucket.shards for piece in own]
        assert bucket.places >= {piece.place for piece in pieces}
        for place, start, stop in pieces:
            owned[place][start:stop] += 1
        sizes = [sum(stop - start for _, start, stop in own) for _, own in bucket.shards]
        # What has no dimensions is a row of one number.
        widths = [one[0].numel() if one.dim() else 1 for one in parameters if one.numel()]
        assert max(sizes) - min(sizes) <= 2 * (max(widths, default=0) if rows else 1)
    assert all((one == 1).all() for one in owned)
    for before, after in pairwise(buckets):
        assert min(before.places, default=0) >= max(after.places, default=0) or not before.places


class Listening(OnTop):
    """Notes what is sent: bytes, and which buckets in which order."""

    def __init__(self, inner):
        super().__init__(inner)
        self.num_bytes = 0
        self.sent = []

    def send(self, edge, number, value):
        self.num_bytes += sum(tensor.nbytes for tensor in tree.tensors(value))
        self.sent.append(edge)
        self.inner.send(edge, number, value)

    def recv(self, edge, number, waiting):
        return self.inner.recv(edge, number, waiting)


class Holders:
    """Copies of a model whose gradients are summed between processes, which are threads here."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.models = [nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))) for _ in range(3)]
        self.rows = torch.randn(NUM_RANKS, 8, 32)
        self.links = [Listening(one) for one in in_shared_memory(NUM_RANKS)]
        self.reducers = [
            make(rank, SharedWeights(0, (0, 1, 2), frozenset({0}), (*model.parameters(),)), link, 5)
            for rank, (model, link) in enumerate(zip(self.models, self.links, strict=True))
        ]

    def round(self, number, *, twice=(), frozen=(), averages=False):
        """One round; what each rank had sent when its backward ended, and the sums as a loop has
        them.

        Args:
            twice: ranks at which the gradients are added to after they were complete.
            frozen: layers that are not trained.
        """
        self.backwards(frozen)
        expected = folded([(*model.parameters(),) for model in self.models], 6 if averages else 1)

        def work(rank):
            self.links[rank].sent.clear()
            with self.reducers[rank].closing(number):
                self.backward(rank)
                if rank in twice:
                    self.backward(rank)
            early = [*self.links[rank].sent]
            self.reducers[rank].hand_in(number, rank + 1)
            self.reducers[rank].advance(averages=averages)
            self.reducers[rank].finish()
            return early

        if twice:
            for rank in twice:
                self.backward(rank)
            expected = folded([(*model.parameters(),) for model in self.models])
        for model in self.models:
            model.zero_grad()
        return on_all_ranks(work, NUM_RANKS), expected

    def backwards(self, frozen):
        for rank, model in enumerate(self.models):
            for index, layer in enumerate(model):
                layer.requires_grad_(index not in frozen)
            model.zero_grad()
            self.backward(rank)

    def backward(self, rank):
        self.models[rank](self.rows[rank]).square().mean().backward()

    def close(self):
        for link in self.links:
            link.close("done")


@pytest.fixture(name="holders_of")
def fixture_holders_of(monkeypatch):
    monkeypatch.setattr(portions_module, "LEAST_PORTION_BYTES", 2000)
    made = []

    def make(reducer):
        made.append(Holders(reducer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def check(holders, expected):
    for model in holders.models:
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert (parameter.grad is None) == (wanted is None)
            assert wanted is None or torch.equal(parameter.grad, wanted)


def test_buckets_leave_while_the_backward_runs_and_nothing_is_sent_twice(holders_of):
    holders = holders_of(OwnerReducer)
    num_bytes = sum(parameter.nbytes for parameter in holders.models[0].parameters())
    others = NUM_RANKS - 1
    for number in range(3):
        early, expected = holders.round(number, averages=number == 2)
        check(holders, expected)
        for rank, edges in enumerate(early):
            shared = holders.reducers[rank]._shared
            lane_of = {shared.edge(0, 0, Purpose.PART, lane).tag: lane for lane in range(5)}
            parts = [lane_of[edge.tag] for edge in edges if edge.tag in lane_of]
            # The first round counts; then four of five leave, the last parameters' first.
            assert parts == ([0, 0, 1, 1, 2, 2, 3, 3] if number else [])
    for link in holders.links:
        formula = 3 * 2 * others / NUM_RANKS * num_bytes
        assert abs(link.num_bytes - formula) <= 3 * 5 * 4 * 2 * others


def test_what_is_frozen_anew_is_neither_awaited_nor_summed(holders_of):
    holders = holders_of(OwnerReducer)
    for number, frozen in enumerate([(), (), (2, 5), (2, 5), (0, 1), ()]):
        check(holders, holders.round(number, frozen=frozen)[1])


@pytest.mark.parametrize("twice", [(1,), (0, 1, 2)])
def test_a_gradient_that_is_added_to_after_it_left_is_summed_once_more(holders_of, twice):
    holders = holders_of(OwnerReducer)
    for number, ranks in enumerate([(), (), twice, (), twice]):
        check(holders, holders.round(number, twice=ranks)[1])
    for link in holders.links:  # nothing is left over
        assert not link.inner._early


def test_rows_leave_while_the_backward_runs(holders_of):
    holders = holders_of(ShardedReducer)
    for number in range(3):
        early, expected = holders.round(number)
        assert all(map(bool, early)) == (number > 0)
        for model, reducer in zip(holders.models, holders.reducers, strict=True):
            owned = 0
            for parameter, wanted in zip(model.parameters(), expected, strict=True):
                start, part = reducer.shards[parameter]
                if part is not None:
                    assert torch.equal(part.grad, wanted[start : start + len(part)])
                    owned += part.numel()
            assert owned == pytest.approx(sum(map(torch.numel, expected)) / 3, rel=0.2)


def test_a_stage_waits_for_its_own_weights_only_and_the_first_layers_come_first(monkeypatch):
    monkeypatch.setattr(portions_module, "LEAST_PORTION_BYTES", 2000)
    torch.manual_seed(0)
    models = [[nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))) for _ in "ab"] for _ in "ab"]
    links = [Listening(one) for one in in_shared_memory(2)]
    sums = [
        GradientSums(
            rank,
            [
                SharedWeights(stage, (0, 1), frozenset({stage}), (*model.parameters(),))
                for stage, model in enumerate(own)
            ],
            links[rank],
            everywhere=True,
            make=partial(ShardedReducer, most_buckets=4),
        )
        for rank, own in enumerate(models)
    ]
    for rank, (own, number) in enumerate(zip(models, (1.0, 2.0), strict=True)):
        sums[rank].begin(7, averages=False)
        sums[rank].shards(hands_sums_to_all=False)
        for model in own:
            for parameter in model.parameters():
                parameter.data.fill_(number)
    sums[0].hand_back(0)
    sums[1].hand_back(0)
    sums[1].hand_back(1)
    sums[0].take_back(0)  # although rank 0 has not stepped stage 1, nor rank 1 been heard of it
    assert {float(one) for p in models[0][0].parameters() for one in p.detach().unique()} == {1, 2}
    assert all((p == 1.0).all() for p in models[0][1].parameters())
    lanes = [edge.tag % 16 for edge in links[0].sent]
    assert lanes == [3, 2, 1, 0]  # those that were made last: the first layers'
    sums[0].hand_back(1)
    for one in sums:
        one.take_back()
    for stage in range(2):
        pairs = zip(models[0][stage].parameters(), models[1][stage].parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    for link in links:
        link.close("done")
