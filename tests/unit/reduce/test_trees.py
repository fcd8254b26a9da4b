"""Sums in a tree: their bits, their messages, the order in which they leave, and who is missed."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.base.errors import PeerError
from penstock.core.summation import split
from penstock.core.summation.tree import SumTree
from penstock.engine.model import tree as values
from penstock.engine.reduce.buckets import buckets_of
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.reduce.reducer import Purpose, SharedWeights
from penstock.engine.reduce.sharding import ShardedReducer
from penstock.engine.reduce.sums import begin_equal
from penstock.engine.transport.base import OnTop
from penstock.planning.plans.summing import Summing
from tests.unit.reduce.test_sums import (
    SHAPES,
    between_threads,
    fill,
    holders,
    in_shared_memory,
    on_all_ranks,
)

TWO_HOSTS = ((0, 0, 1, 1),)
BEHIND_SWITCHES = ((0, 0, 1, 1, 2, 2), (0, 0, 0, 0, 1, 1))


@st.composite
def layouts(draw):
    """Summing of two to six holders, on hosts and behind switches, whatever their numbers."""
    switches = draw(st.lists(st.integers(0, 4), min_size=2, max_size=6))
    hosts = draw(st.lists(st.integers(0, 2), min_size=5, max_size=5))
    levels = (tuple(switches), tuple(hosts[switch] for switch in switches))
    return Summing(levels=levels, across=draw(st.sampled_from(["every", "first"])))


class Counting(OnTop):
    """Counts messages and bytes by pair and purpose; hands over tensors as processes do."""

    def __init__(self, inner, shared):
        super().__init__(inner)
        tags = {
            shared.edge(0, 0, purpose, lane).tag: purpose
            for purpose in Purpose
            for lane in range(16)
        }
        self.purpose_of = tags
        self.messages, self.num_bytes, self.order = Counter(), Counter(), []

    def send(self, edge, number, value):
        key = edge.source, edge.target, self.purpose_of[edge.tag]
        self.messages[key] += 1
        self.num_bytes[key] += sum(tensor.nbytes for tensor in values.tensors(value))
        self.order.append((key[2], edge.target, edge.tag % 16))
        self.inner.send(edge, number, value)

    def recv(self, edge, number, waiting):
        return values.replace(torch.Tensor, torch.clone, self.inner.recv(edge, number, waiting))


def folded(copies, tree, divisor=1):
    """What the tree makes of the gradients of copies by rank, as one process adds them."""
    sums = []
    for column in zip(*copies.values(), strict=True):
        pairs = zip(copies, column, strict=True)
        there = {rank: one.grad for rank, one in pairs if one.grad is not None}
        total = tree.fold(there, torch.add) if there else None
        sums.append(total / divisor if total is not None and divisor > 1 else total)
    return sums


class Group:
    """Holders in a tree, each with its reducer."""

    def __init__(self, make, summing, connect, *, most=1, num_servers=0, shapes=SHAPES):
        self.count = len(summing.levels[0]) + num_servers
        self.workers = range(self.count - num_servers)
        ranks = tuple(range(self.count))
        servers = ranks[len(self.workers) :]
        self.tree = summing.tree(ranks, servers or None)
        self.copies = holders(self.count, shapes)
        shared = [SharedWeights(0, ranks, frozenset({0}), own) for own in self.copies]
        self.links = [Counting(link, shared[0]) for link in connect(self.count)]
        self.reducers = [
            make(rank, shared[rank], link, most, servers, self.tree)
            for rank, link in enumerate(self.links)
        ]

    def round(self, number, *, averages=False):
        """Sum; what the tree makes of the gradients."""
        divisor = sum(rank + 1 for rank in self.workers) if averages else 1
        expected = folded({rank: self.copies[rank] for rank in self.workers}, self.tree, divisor)

        def work(rank):
            reducer = self.reducers[rank]
            reducer.hand_in(number, rank + 1)
            reducer.advance(averages=averages)
            reducer.finish()

        on_all_ranks(work, self.count)
        return expected

    def update(self, number):
        """Every owner subtracts the sum from its rows, and hands them to all."""

        def work(rank):
            reducer = self.reducers[rank]
            for shard in reducer.shards.values():
                if shard.part is not None and shard.part.grad is not None:
                    shard.part.data.sub_(shard.part.grad)
            reducer.hand_back(number)
            reducer.relay(number)
            reducer.take_back(number)

        on_all_ranks(work, self.count)

    def close(self):
        for link in self.links:
            link.close("done")


@settings(max_examples=25, deadline=None)
@given(
    summing=layouts(),
    most=st.integers(1, 4),
    missing=st.sampled_from([0.0, 0.5, 1.0]),
    averages=st.booleans(),
    connect=st.sampled_from([between_threads, in_shared_memory]),
)
def test_every_holder_has_the_bits_of_the_tree(summing, most, missing, averages, connect):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "LEAST_PORTION_BYTES", 500)
        group = Group(OwnerReducer, summing, connect, most=most)
        for number in range(2):
            fill(group.copies, number, missing)
            expected = group.round(number, averages=averages)
            for parameters in group.copies:
                check(parameters, expected)
    group.close()


def check(parameters, expected):
    """Gradients are these to the bit; of parameters without numbers nothing is asked."""
    for parameter, wanted in zip(parameters, expected, strict=True):
        if wanted is None:
            assert parameter.grad is None
        elif wanted.numel():
            assert torch.equal(parameter.grad, wanted)


@settings(max_examples=25, deadline=None)
@given(
    summing=layouts(),
    most=st.integers(1, 4),
    num_servers=st.integers(0, 2),
    hands_out=st.booleans(),
    connect=st.sampled_from([between_threads, in_shared_memory]),
)
def test_rows_and_servers_update_with_the_bits_of_the_tree(
    summing, most, num_servers, hands_out, connect
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "LEAST_PORTION_BYTES", 500)
        most = 1 if num_servers else most
        group = Group(ShardedReducer, summing, connect, most=most, num_servers=num_servers)
    for reducer in group.reducers:
        reducer.hands_sums_to_all = hands_out
    before = [parameter.detach().clone() for parameter in group.copies[0]]
    fill([group.copies[rank] for rank in group.workers], 3)
    expected = group.round(5)
    if hands_out:
        for parameters, reducer in zip(group.copies, group.reducers, strict=True):
            check(parameters, expected)
            for parameter, wanted in zip(parameters, expected, strict=True):
                start, part = reducer.shards[parameter]
                if part is not None:
                    part.grad = wanted[start : start + len(part)] if part.dim() else wanted
    group.update(5)
    for rank in group.workers:
        for parameter, old, wanted in zip(group.copies[rank], before, expected, strict=True):
            assert torch.equal(parameter.detach(), old - wanted)
    group.close()


@pytest.mark.parametrize("levels", [TWO_HOSTS, BEHIND_SWITCHES, ((0, 1, 2),)])
@pytest.mark.parametrize("make", [OwnerReducer, ShardedReducer])
def test_what_crosses_is_what_the_tree_says(levels, make):
    group = Group(make, Summing(levels=levels), between_threads, shapes=[((960, 8), torch.float32)])
    fill(group.copies, 0)
    group.round(1)
    back = Purpose.SUM
    if make is ShardedReducer:
        group.update(1)
        back = Purpose.WEIGHTS
    num_bytes, row = group.copies[0][0].nbytes, 32
    messages = sum((link.messages for link in group.links), Counter())
    sent = sum((link.num_bytes for link in group.links), Counter())
    expected = Counter()
    for level in range(group.tree.num_levels):
        for source, target, owner in group.tree.steps(level):
            expected[source, target] += group.tree.shares[owner] * num_bytes
    assert messages == {key: 1 for a, b in expected for key in ((a, b, Purpose.PART), (b, a, back))}
    for (source, target), size in expected.items():
        assert abs(sent[source, target, Purpose.PART] - size) <= 4 * row
        assert abs(sent[target, source, back] - size) <= 4 * row


class Deep:
    """Copies of a model on two hosts whose gradients leave while backwards run."""

    def __init__(self, make, levels, across):
        torch.manual_seed(0)
        count = len(levels[0])
        self.tree = Summing(levels=levels, across=across).tree(range(count))
        self.models = [nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))) for _ in levels[0]]
        self.rows = torch.randn(count, 8, 32)
        shared = [
            SharedWeights(0, tuple(range(count)), frozenset({0}), (*model.parameters(),))
            for model in self.models
        ]
        self.links = [Counting(link, shared[0]) for link in in_shared_memory(count)]
        self.reducers = [
            make(rank, shared[rank], link, 5, tree=self.tree)
            for rank, link in enumerate(self.links)
        ]

    def backward(self, rank):
        self.models[rank](self.rows[rank]).square().mean().backward()

    def round(self, number, twice=(), *, slow=False):
        """One round: the sums, as the tree has them, and what each rank had sent when its backward
        ended."""
        for rank, model in enumerate(self.models):
            model.zero_grad()
            for _ in range(2 if rank in twice else 1):
                self.backward(rank)
        copies = {rank: (*model.parameters(),) for rank, model in enumerate(self.models)}
        expected = folded(copies, self.tree)
        for model in self.models:
            model.zero_grad()
        together = threading.Barrier(len(self.models), timeout=300)
        hooks = [
            model[2].register_full_backward_hook(lambda *_: together.wait() < 0 or None)
            for model in self.models
            if slow  # then all are as far, and what left before has come
        ]

        def work(rank):
            self.links[rank].order.clear()
            with self.reducers[rank].closing(number):
                for _ in range(2 if rank in twice else 1):
                    self.backward(rank)
            early = [*self.links[rank].order]
            self.reducers[rank].hand_in(number, 1)
            self.reducers[rank].advance(averages=False)
            self.reducers[rank].finish()
            return early

        early = on_all_ranks(work, len(self.models))
        for hook in hooks:
            hook.remove()
        return expected, early

    def check_all(self, expected):
        for model in self.models:
            check(model.parameters(), expected)

    def close(self):
        for link in self.links:
            link.close("done")


@pytest.fixture(name="deep")
def fixture_deep(monkeypatch):
    monkeypatch.setattr(split, "LEAST_PORTION_BYTES", 2000)
    made = []

    def make(reducer, levels, across="every"):
        made.append(Deep(reducer, levels, across))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.mark.parametrize("levels", [TWO_HOSTS, BEHIND_SWITCHES])
def test_partial_sums_cross_while_the_backward_runs(deep, levels):
    group = deep(OwnerReducer, levels)
    group.check_all(group.round(0)[0])  # the first round counts
    expected, early = group.round(1, slow=True)
    group.check_all(expected)
    near = {frozenset(pair) for pair in near_pairs(levels)}
    for rank, sent in enumerate(early):
        crossing = [
            lane
            for purpose, target, lane in sent
            if purpose is Purpose.PART and frozenset((rank, target)) not in near
        ]
        assert crossing, f"rank {rank} sent {sent}"


def near_pairs(levels):
    """Pairs of one innermost group."""
    numbers = levels[0]
    return [(a, b) for a in range(len(numbers)) for b in range(a) if numbers[a] == numbers[b]]


@pytest.mark.parametrize("levels", [TWO_HOSTS, BEHIND_SWITCHES])
@pytest.mark.parametrize("twice", [(1,), (0, 1, 2, 3)])
@pytest.mark.parametrize("across", ["every", "first"])
def test_a_gradient_that_is_added_to_after_it_left_goes_up_once_more(deep, levels, twice, across):
    group = deep(OwnerReducer, levels, across)
    for number, ranks in enumerate([(), (), twice, (), twice]):
        group.check_all(group.round(number, twice=ranks)[0])
    for link in group.links:  # nothing is left over
        assert not link.inner._early


def test_all_partial_sums_leave_before_anything_is_waited_for_on_the_way_back(deep):
    """What crosses keeps both directions of a card busy: no sum is awaited while a partial sum
    could leave."""
    group = deep(OwnerReducer, TWO_HOSTS)
    group.round(0)
    for link in group.links:
        link.has_come = lambda *_: None  # nobody can tell, as between accelerators
    group.check_all(group.round(1)[0])
    for rank, link in enumerate(group.links):
        crossing = [
            (purpose, lane)
            for purpose, target, lane in link.order
            if target // 2 != rank // 2 and purpose is not Purpose.WEIGHTS
        ]
        parts = [at for at, (purpose, _) in enumerate(crossing) if purpose is Purpose.PART]
        sums = [at for at, (purpose, _) in enumerate(crossing) if purpose is Purpose.SUM]
        assert parts and sums and max(parts) < min(sums)
        assert [crossing[at][1] for at in parts] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("reverse", [False, True])
def test_groups_with_different_holders_do_not_wait_in_a_circle(reverse):
    """Stages whose copies are on other ranks each, in whatever order ranks finish them."""
    summing = Summing(levels=((0, 0, 0, 1, 1, 1),))
    held = {0: (0, 1, 3, 4), 1: (1, 2, 4, 5), 2: (0, 2, 3, 5)}
    transports = in_shared_memory(6)
    copies = {tag: dict(zip(ranks, holders(4), strict=True)) for tag, ranks in held.items()}
    reducers = {}
    expected = {}
    for tag, ranks in held.items():
        fill([*copies[tag].values()], tag)
        tree = summing.tree(ranks)
        expected[tag] = folded(copies[tag], tree)
        for rank in ranks:
            shared = SharedWeights(tag, ranks, frozenset({tag}), copies[tag][rank])
            reducers[tag, rank] = OwnerReducer(rank, shared, transports[rank], 3, tree=tree)

    def work(rank):
        own = [tag for tag, ranks in held.items() if rank in ranks]
        for tag in own:
            reducers[tag, rank].hand_in(1, 1)
        for tag in own:
            reducers[tag, rank].advance(averages=False)
        for tag in reversed(own) if reverse and rank % 2 else own:
            reducers[tag, rank].finish()

    on_all_ranks(work, 6)
    for tag, own in copies.items():
        for parameters in own.values():
            check(parameters, expected[tag])
    for transport in transports:
        transport.close("done")


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("handed_in", [False, True])
def test_a_holder_that_leaves_is_named_whoever_relays(victim, handed_in):
    group = Group(OwnerReducer, Summing(levels=TWO_HOSTS), in_shared_memory)
    fill(group.copies, 0)
    together = threading.Barrier(4, timeout=300)

    def work(rank):
        reducer = group.reducers[rank]
        if rank != victim or handed_in:
            reducer.hand_in(1, 1)
        together.wait()
        if rank == victim:
            group.links[rank].close("it was told to")
            return f"rank {victim} closed its pipeline (it was told to)"
        with pytest.raises(PeerError) as raised:
            reducer.advance(averages=False)
            reducer.finish()
        group.links[rank].fail(raised.value.reason, reducer.outgoing())
        return str(raised.value)

    for message in on_all_ranks(work, 4):
        assert f"rank {victim} closed its pipeline (it was told to)" in message
    group.close()


@pytest.mark.parametrize("levels", [TWO_HOSTS, BEHIND_SWITCHES, ((0, 1, 2),)])
def test_weights_to_begin_with_go_down_the_tree(levels):
    summing, count = Summing(levels=levels), len(levels[0])
    ranks = tuple(range(count))
    copies = holders(count)
    for rank, own in enumerate(copies):
        for parameter in own:
            nn.init.constant_(parameter, rank + 1)
    shared = [SharedWeights(0, ranks, frozenset({0}), own) for own in copies]
    links = [Counting(link, shared[0]) for link in in_shared_memory(count)]
    on_all_ranks(lambda rank: begin_equal(rank, shared[rank], links[rank], summing), count)
    assert all((parameter == 1).all() for own in copies for parameter in own)
    root = SumTree(summing.tree(ranks).levels, (0,))
    pairs = {
        (target, source)
        for level in range(root.num_levels)
        for source, target, _ in root.steps(level)
    }
    sent = {key[:2] for link in links for key in link.messages if link.num_bytes[key] > 8}
    assert sent == pairs
    for link in links:
        link.close("done")


@pytest.mark.parametrize("across", ["every", "first"])
def test_rows_that_are_added_to_after_they_left_go_up_once_more(deep, across):
    """Who owns none is told, too, which gradients to give again."""
    group = deep(ShardedReducer, TWO_HOSTS, across)
    for number, twice in enumerate([(), (), (1,), (), (3,)]):
        expected, _ = group.round(number, twice=twice)
        for model, reducer in zip(group.models, group.reducers, strict=True):
            for parameter, wanted in zip(model.parameters(), expected, strict=True):
                start, part = reducer.shards[parameter]
                assert part is None or torch.equal(part.grad, wanted[start : start + len(part)])


def test_parameter_servers_have_delegates_of_their_own():
    tree = Summing(levels=TWO_HOSTS).tree(range(6), [4, 5])
    assert [tree.delegate(0, 0, owner) for owner in (4, 5)] == [0, 1]
    assert [tree.delegate(0, 2, owner) for owner in (4, 5)] == [2, 3]


def test_buckets_have_the_weights_of_their_owners():
    parameters = {0: nn.Parameter(torch.zeros(300)), 1: nn.Parameter(torch.zeros(300))}
    tree = Summing(levels=((0, 1, 1, 1),)).tree(range(4))
    (bucket,) = buckets_of(parameters, tree.weights, most=1)
    sizes = [sum(stop - start for _, start, stop in own) for _, own in bucket.shards]
    assert sizes == [300, 100, 100, 100]


def test_rows_have_the_weights_of_their_owners():
    """A card has half of the rows, however many devices are behind it."""
    group = Group(
        ShardedReducer, Summing(levels=((0, 1, 1, 1),)), between_threads,
        shapes=[((600, 4), torch.float32)],
    )  # fmt: skip
    rows = [
        shard.stop - shard.start for reducer in group.reducers for shard in reducer.shards.values()
    ]
    assert rows == [300, 100, 100, 100]
