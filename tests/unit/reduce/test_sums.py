"""Sums of shared weights by owners: their bits, their bytes, their order, and what goes wrong."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.base.errors import PeerError, RunError
from penstock.engine.model import tree
from penstock.engine.reduce.buckets import buckets_of
from penstock.engine.reduce.reducer import SharedWeights
from penstock.engine.reduce.sums import GradientSums
from penstock.engine.transport import ThreadExchange
from penstock.engine.transport.base import SHARED_TAGS, Patience
from penstock.engine.transport.threads import ThreadTransport
from tests.kit.alive import Alive
from tests.unit.transport.test_shared_memory import connected

DEADLINE_SECONDS = 300.0
SHAPES = [
    ((40, 30), torch.float32),
    ((3,), torch.bfloat16),
    ((), torch.float32),
    ((8, 3, 3, 3), torch.float32),
    ((0, 4), torch.float32),
    ((17,), torch.float64),
    ((5, 7), torch.bfloat16),
    ((1,), torch.float32),
]
IMAGES = 3
"""The place of a weight whose gradient is not contiguous."""


def between_threads(num_ranks):
    return ThreadExchange(num_ranks, DEADLINE_SECONDS).transports


def in_shared_memory(num_ranks):
    return connected(num_ranks, DEADLINE_SECONDS)


def holders(num_ranks, shapes=SHAPES):
    """Of each rank, its copies of the same weights."""
    return [
        tuple(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes)
        for _ in range(num_ranks)
    ]


def fill(copies, seed, missing=0.0):
    """Give every copy gradients that cannot be added without rounding."""
    generator = torch.Generator().manual_seed(seed)
    for parameters in copies:
        for place, parameter in enumerate(parameters):
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            gradient = (1e3**random).to(parameter.dtype)
            if place == IMAGES and gradient.dim() == 4:
                gradient = gradient.contiguous(memory_format=torch.channels_last)
            absent = torch.rand((), generator=generator) < missing
            parameter.grad = None if absent else gradient


def folded(copies, divisor=1):
    """What a loop over the ranks makes of their gradients."""
    sums = []
    for column in zip(*copies, strict=True):
        there = [one.grad for one in column if one.grad is not None]
        total = sum(there[1:], there[0].clone()) if there else None
        sums.append(total / divisor if total is not None and divisor > 1 else total)
    return sums


def sums_of(copies, transports, *, everywhere=True):
    ranks = tuple(range(len(copies)))
    return [
        GradientSums(
            rank,
            [SharedWeights(0, ranks, frozenset({0}), parameters)],
            transport,
            everywhere=everywhere,
        )
        for rank, (parameters, transport) in enumerate(zip(copies, transports, strict=True))
    ]


def on_all_ranks(work, count):
    """Call ``work`` with every rank at once; what each returns, or the first error."""
    with ThreadPoolExecutor(count) as pool:
        return [one.result() for one in [pool.submit(work, rank) for rank in range(count)]]


def complete(sums, number, *, averages=False):
    def work(rank):
        sums[rank].begin(number, averages=averages)
        for _ in range(rank + 1):
            sums[rank].gathered()
        sums[rank].hand_in(0)
        sums[rank].complete()

    on_all_ranks(work, len(sums))


@pytest.mark.parametrize("connect", [between_threads, in_shared_memory])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_every_holder_has_the_bits_of_a_loop_over_the_ranks(num_ranks, connect):
    copies, transports = holders(num_ranks), connect(num_ranks)
    sums = sums_of(copies, transports)
    for number, (missing, averages) in enumerate(itertools.product((0.0, 0.5, 1.0), (False, True))):
        fill(copies, number, missing)
        expected = folded(copies, sum(range(1, num_ranks + 1)) if averages else 1)
        complete(sums, number, averages=averages)
        for parameters in copies:
            for parameter, wanted in zip(parameters, expected, strict=True):
                if wanted is None:
                    assert parameter.grad is None
                elif wanted.numel():
                    assert torch.equal(parameter.grad, wanted)
                    assert missing or parameter.grad.stride() == wanted.stride()
        gradients = [one.grad for own in copies for one in own if one.grad is not None]
        memory = [gradient.data_ptr() for gradient in gradients if gradient.numel()]
        assert len(set(memory)) == len(memory)
    for transport in transports:
        transport.close("done")


def test_gradients_that_are_not_dense_are_summed_between_threads():
    copies = holders(3, [((6, 2), torch.float32)])
    for rank, (parameter,) in enumerate(copies):
        rows = torch.tensor([[rank, 5]])
        values = torch.full((2, 2), 1.0 + rank)
        parameter.grad = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=True)
    expected = sum(parameter.grad.to_dense() for (parameter,) in copies)
    complete(sums_of(copies, between_threads(3)), 0)
    for (parameter,) in copies:
        assert parameter.grad.is_sparse
        assert torch.equal(parameter.grad.to_dense(), expected)


def test_what_is_only_gathered_stays_with_the_first_holder():
    copies = holders(2)
    fill(copies, 0)
    expected = folded(copies)
    complete(sums_of(copies, between_threads(2), everywhere=False), 0)
    assert all(parameter.grad is None for parameter in copies[1])
    for parameter, wanted in zip(copies[0], expected, strict=True):
        assert torch.equal(parameter.grad, wanted)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_slices_are_equal_and_cover_every_number_once(count):
    parameters = dict(enumerate(holders(1)[0]))
    (bucket,) = buckets_of(parameters, dict.fromkeys(range(count), 1), most=1)
    slices = bucket.shards
    pieces = [piece for one in slices for piece in one.ranges]
    for place, parameter in parameters.items():
        own = [range(start, stop) for at, start, stop in pieces if at == place]
        assert [*itertools.chain(*own)] == [*range(parameter.numel())]
    sizes = [
        sum((stop - start) * parameters[place].element_size() for place, start, stop in one.ranges)
        for one in slices
    ]
    assert max(sizes) - min(sizes) <= 2 * max(one.element_size() for one in parameters.values())


def test_ranks_may_come_to_their_stages_in_any_order():
    num_ranks, orders = 3, ((0, 1, 2), (2, 1, 0), (1, 2, 0))
    transports = ThreadExchange(num_ranks, 5.0).transports
    copies = {stage: holders(num_ranks) for stage in range(3)}
    for stage, own in copies.items():
        fill(own, stage)
    expected = {stage: folded(own) for stage, own in copies.items()}

    def work(rank):
        shared = [
            SharedWeights(stage, (0, 1, 2), frozenset({stage}), own[rank])
            for stage, own in copies.items()
        ]
        sums = GradientSums(rank, shared, transports[rank], everywhere=True)
        sums.begin(0, averages=False)
        for stage in orders[rank]:
            sums.hand_in(stage)
        for stage in orders[rank]:
            sums.complete(stage)

    on_all_ranks(work, num_ranks)
    for stage, own in copies.items():
        for parameter, wanted in zip(own[2], expected[stage], strict=True):
            assert torch.equal(parameter.grad, wanted)


def test_holders_that_train_different_weights_are_told():
    copies = holders(2)
    fill(copies, 0)
    copies[1][3].requires_grad_(False)
    with pytest.raises(RunError, match="hold the same weights, but do not train the same of them"):
        complete(sums_of(copies, between_threads(2)), 0)


@pytest.mark.parametrize("handed_in", [False, True])
@pytest.mark.parametrize("connect", [between_threads, in_shared_memory])
def test_a_holder_that_leaves_is_named_on_every_rank(connect, handed_in):
    copies, transports = holders(3), connect(3)
    sums = sums_of(copies, transports)
    fill(copies, 0)
    together = threading.Barrier(3, timeout=DEADLINE_SECONDS)

    def work(rank):
        sums[rank].begin(0, averages=False)
        if rank < 2 or handed_in:
            sums[rank].hand_in(0)
        together.wait()
        if rank == 2:
            transports[rank].close("it was told to")
            return ""
        with pytest.raises(PeerError) as raised:
            sums[rank].complete()
        # As whoever drives a rank tells the others.
        transports[rank].fail(raised.value.reason, sums[rank].outgoing())
        return str(raised.value)

    for rank, message in enumerate(on_all_ranks(work, 3)[:2]):
        assert message.startswith(f"rank {rank}, ")
        assert "rank 2 closed its pipeline (it was told to)" in message


def data_parallel(num_ranks):
    """A model, and a plan of as many copies of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32))
    graph = pk.profile(
        model, torch.randn(2, 64), targets=torch.randn(2, 32), loss=nn.functional.mse_loss,
        ranks=0, repeats=1,
    )  # fmt: skip
    plan = pk.plan(
        graph, pk.Cluster.local(num_ranks), microbatches=num_ranks, schedule="1f1b",
        replicas=str(num_ranks),
    )  # fmt: skip
    return model, plan


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_sends_as_many_bytes_as_a_ring_would(num_ranks, monkeypatch):
    sent, send = Counter(), ThreadTransport.send

    def counting(transport, edge, number, value):
        if edge.tag >= SHARED_TAGS:
            sent[edge.source] += sum(tensor.nbytes for tensor in tree.tensors(value))
        send(transport, edge, number, value)

    model, plan = data_parallel(num_ranks)
    monkeypatch.setattr(ThreadTransport, "send", counting)
    with pk.Pipeline(
        model, plan, loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ) as pipeline:  # fmt: skip
        pipeline.step(torch.randn(8, 64), torch.randn(8, 32))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for rank in range(num_ranks):
        assert sent[rank] == pytest.approx(2 * (num_ranks - 1) / num_ranks * num_bytes, rel=0.001)


class Copying(ThreadTransport):
    """Gives the receiver tensors of its own, as it gets between processes."""

    def recv(self, edge, number, waiting):
        return tree.replace(torch.Tensor, torch.clone, super().recv(edge, number, waiting))


class Watching(Alive):
    """Remembers the most that was alive behind any operation."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        del args
        self.most = max(self.most, self.num_bytes())
        return result


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sum_keeps_what_the_plan_says(num_ranks):
    model, plan = data_parallel(num_ranks)
    (stage,) = plan.stages
    copies = holders(num_ranks, [(p.shape, p.dtype) for p in model.parameters()])
    fill(copies, 0)
    exchange = ThreadExchange(num_ranks, DEADLINE_SECONDS)
    transports = [Copying(exchange, rank, Patience(DEADLINE_SECONDS)) for rank in range(num_ranks)]
    sums = sums_of(copies, transports)

    def work(rank):
        with Watching([one.grad for own in copies for one in own]) as alive:
            sums[rank].begin(0, averages=False)
            sums[rank].hand_in(0)
            sums[rank].complete()
        return alive.most

    # A number more or less where slices meet.
    assert on_all_ranks(work, num_ranks) == pytest.approx([stage.sum_bytes] * num_ranks, abs=32)
    assert stage.memory_bytes >= 3 * stage.sum_bytes  # weights, gradients, and this
