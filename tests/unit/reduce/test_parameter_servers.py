"""What parameter servers and their workers send."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from penstock.base.errors import RunError
from penstock.core.summation.split import MOST_PORTIONS
from penstock.engine.model import tree
from penstock.engine.reduce.reducer import Purpose, SharedWeights
from penstock.engine.reduce.sharding import (
    _ELEMENTWISE,
    ShardedReducer,
    Shards,
    steps_by_parameter,
)
from penstock.engine.transport.base import OnTop
from tests.kit.waiting import until
from tests.unit.reduce.test_sums import (
    between_threads,
    fill,
    folded,
    holders,
    in_shared_memory,
    on_all_ranks,
)


class Counting(OnTop):
    """Counts the bytes of tensors that a rank sends."""

    def __init__(self, inner, sent):
        super().__init__(inner)
        self.sent = sent

    def send(self, edge, number, value):
        self.sent[edge.source] += sum(tensor.nbytes for tensor in tree.tensors(value))
        self.inner.send(edge, number, value)

    def recv(self, edge, number, waiting):
        return tree.replace(torch.Tensor, torch.clone, self.inner.recv(edge, number, waiting))


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("hands_out", [False, True])
def test_a_worker_sends_what_it_has_once_and_gets_weights(num_workers, num_servers, hands_out):
    count = num_workers + num_servers
    servers = range(num_workers, count)
    copies = holders(count, [((96, 40), torch.float32), ((96,), torch.float32)])
    sent = Counter()
    reducers = [
        ShardedReducer(
            rank,
            SharedWeights(0, tuple(range(count)), frozenset({0}), copies[rank]),
            Counting(transport, sent),
            servers=servers,
        )
        for rank, transport in enumerate(between_threads(count))
    ]
    fill(copies[:num_workers], 0)
    expected = folded(copies[:num_workers])

    def work(rank):
        reducer = reducers[rank]
        reducer.hands_sums_to_all = hands_out
        reducer.hand_in(1, 1)
        reducer.advance(averages=False)
        reducer.finish()
        Shards(reducer.shards).lend()
        for shard in reducer.shards.values():
            assert rank in servers or shard.part is None
            if shard.part is not None:
                shard.part.data.sub_(shard.part.grad)
        reducer.hand_back(1)
        reducer.take_back(1)

    on_all_ranks(work, count)
    for parameters in copies[:num_workers]:
        for parameter, wanted in zip(parameters, expected, strict=True):
            assert torch.equal(parameter.detach(), -wanted)
    num_bytes, row = sum(one.nbytes for one in copies[0]), copies[0][0][0].nbytes
    assert {sent[rank] for rank in range(num_workers)} == {num_bytes}
    for rank in servers:
        sums = hands_out * (count - 1)
        formula = (num_workers + sums) * num_bytes / num_servers
        assert abs(sent[rank] - formula) <= (num_workers + sums) * row


SHAPES = [((40, 30), torch.float32), ((64,), torch.float32), ((24, 30), torch.float32)]


@contextmanager
def two_workers_and_a_server(monkeypatch, shapes=SHAPES):
    """Their reducers, in shared memory, with several buckets."""
    monkeypatch.setattr("penstock.core.summation.split.LEAST_PORTION_BYTES", 2000)
    copies, transports = holders(3, shapes), in_shared_memory(3)
    made = [
        ShardedReducer(
            rank, SharedWeights(0, (0, 1, 2), frozenset({0}), copies[rank]), transports[rank],
            MOST_PORTIONS, servers=(2,),
        )
        for rank in range(3)
    ]  # fmt: skip
    yield copies, made
    for transport in transports:
        transport.close("done")


def test_a_server_answers_a_bucket_before_the_next_has_come(monkeypatch):
    with two_workers_and_a_server(monkeypatch) as (copies, (first, second, server)):
        fill(copies[:2], 0)
        before = [parameter.detach().clone() for parameter in copies[0]]
        expected = folded(copies[:2])
        optimizer = torch.optim.SGD(copies[2], lr=0.5)
        Shards(server.shards).put_into(optimizer, "stage 0")
        for worker in (first, second):
            worker._give(0, worker._begin(1).under_way)  # as its last backward does

        def serve():
            server.hand_in(1, 0)
            server.update_in_turn(optimizer.step)

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            edge = first._shared.edge(2, 0, Purpose.WEIGHTS, 0)
            assert until(lambda: first._transport.has_come(edge, 1)) and not served.done()
            for worker in (first, second):
                worker.hand_in(1, 3)
                worker.advance(averages=False)
                worker.finish()
            served.result()
            for worker in (first, second):
                worker.take_back(1)
        for own in copies[:2]:
            for parameter, old, gradient in zip(own, before, expected, strict=True):
                assert torch.equal(parameter, old.add(gradient, alpha=-0.5))
        assert [(one.server, one.start < one.end) for one in first.take_served()] == [
            (0, True) for _ in server._of_rows
        ]


def test_a_gradient_that_was_added_to_after_it_left_is_not_answered(monkeypatch):
    with two_workers_and_a_server(monkeypatch) as (copies, (first, second, server)):
        fill(copies[:2], 0)
        first._begin(1).again.add(0)
        for reducer in (first, second, server):
            reducer.hand_in(1, 1)
        with pytest.raises(RunError, match="added to after it had left for a parameter server"):
            server.update_in_turn(lambda: None)


@pytest.mark.parametrize("name", sorted(_ELEMENTWISE))
@pytest.mark.parametrize("foreach", [False, True])
def test_steps_of_some_parameters_make_the_step_of_all(name, foreach):
    def made():
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(6, 5)) for _ in range(4)]
        groups = [{"params": parameters[:1], "lr": 0.01}, {"params": parameters[1:]}]
        options = {"momentum": 0.9} if name in {"SGD", "RMSprop"} else {}
        kind = getattr(torch.optim, name)
        return parameters, kind(groups, lr=0.02, foreach=foreach, **options)

    (whole, at_once), (parts, in_turn) = made(), made()
    assert steps_by_parameter(in_turn)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(6, 5, generator=generator) for _ in whole]
        for parameter, gradient in zip(whole, gradients, strict=True):
            parameter.grad = gradient.clone()
        at_once.step()
        for some in ([3], [2, 1], [0]):
            for place in some:
                parts[place].grad = gradients[place].clone()
            in_turn.step()
            for place in some:
                parts[place].grad = None
    assert all(map(torch.equal, whole, parts))


def test_an_optimizer_that_counts_its_steps_is_stepped_once():
    class Counting(torch.optim.SGD):
        elementwise = True

    parameters = [nn.Parameter(torch.zeros(2))]
    assert not steps_by_parameter(Counting(parameters, lr=0.1))
    watched = torch.optim.SGD(parameters, lr=0.1)
    assert steps_by_parameter(watched)
    watched.register_step_post_hook(lambda *_: None)
    assert not steps_by_parameter(watched)
