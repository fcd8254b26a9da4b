"""What every contestant looks like, the simplest of them, and the proof that all do the same work.

A ``Peer`` is one way to do a ``Work`` on this rank. All are built from the same work and trained
alike, so that a benchmark can take turns between them inside one job of two ranks with one thread
each::

    torchrun --nproc-per-node=2 -m benchmarks.contest.runtime
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.works import Work
from penstock.engine.device.memory import keep_freed_pages

Step = Callable[[Tensor, Tensor], "Tensor | None"]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Peer:
    """One way to do the work.

    Attributes:
        part: the layers that this rank holds.
        indices: which of the spine's layers they are.
        step: ``(inputs, targets) -> loss``: gradients of one minibatch, then an update. The mean
            loss on ranks that have it, ``None`` on the others.
        steps: the same of one minibatch after another; by default ``step`` of each.
        shares: each rank returns its share of the loss; the ranks' sum is the loss.
        same_order: gradients are summed in the order of the microbatches, as by one process.
        close: ends its threads and channels.
    """

    part: nn.Sequential
    indices: Sequence[int]
    step: Step
    steps: Callable[[Iterable[Batch]], Iterable[Tensor | None]] | None = None
    shares: bool = False
    same_order: bool = True
    close: Callable[[], None] = lambda: None

    def train(self, batches: Iterable[Batch]) -> list[Tensor | None]:
        """Train on minibatches; their losses."""
        if self.steps is not None:
            return list(self.steps(batches))
        return [self.step(*batch) for batch in batches]


def accumulating(
    work: Work, part: nn.Sequential, indices: Sequence[int], backward: Step, **more: Any
) -> Peer:
    """A peer of a function that accumulates the gradients of one minibatch."""
    optimizer = work.build_optimizer(part.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        optimizer.zero_grad()
        value = backward(inputs, targets)
        optimizer.step()
        return value

    return Peer(part, indices, step, **more)


def mean_in_order(losses: Sequence[Tensor], count: int) -> Tensor:
    """The sum of losses, from the first to the last, over a number of microbatches."""
    return sum(losses[1:], losses[0]).detach() / count


def one_process(work: Work) -> Peer:
    """The unpartitioned model, microbatch by microbatch, on this rank alone."""
    model = nn.Sequential(*work.layers())

    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        count = work.num_microbatches
        losses = []
        for pair in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            value = work.loss(model(pair[0]), pair[1])
            (value / count).backward()
            losses.append(value.detach().clone())
        return mean_in_order(losses, count)

    return accumulating(work, model, range(len(model)), backward)


class After(NamedTuple):
    """Where one process is after a step; gradients and weights by layer and parameter."""

    loss: Tensor
    gradients: list[list[Tensor | None]]
    weights: list[list[Tensor]]


def reference(work: Work, num_steps: int = 2) -> list[After]:
    """What one process computes, step by step, on the work's minibatch."""
    single = one_process(work)
    found = []
    for _ in range(num_steps):
        loss = single.step(work.inputs, work.targets)
        assert loss is not None
        parameters = [list(layer.parameters()) for layer in single.part]
        gradients = [[one.grad for one in layer] for layer in parameters]
        weights = [[one.detach().clone() for one in layer] for layer in parameters]
        found.append(After(loss, gradients, weights))
    return found


class Watch:
    """Sees the gradients with which optimizers step, whoever calls them."""

    def __init__(self) -> None:
        self.on = True
        self._seen: dict[int, Tensor | None] = {}

    def over(self, work: Work) -> Work:
        """The same work, watched."""

        def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = work.build_optimizer(parameters)
            optimizer.register_step_pre_hook(self._look)
            return optimizer

        return replace(work, build_optimizer=build)

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.on:
            for group in optimizer.param_groups:
                self._seen |= {id(one): one.grad for one in group["params"]}

    def gradients(self, layer: nn.Module) -> list[Tensor | None]:
        """Those of a layer's parameters at the last step, as they were summed."""
        return [self._seen[id(parameter)] for parameter in layer.parameters()]

    def end(self) -> None:
        """See nothing any more, keep nothing."""
        self.on = False
        self._seen.clear()


def prove_same(work: Work, expected: Sequence[After], peer: Peer, watch: Watch) -> bool:
    """Assert that losses, gradients and updated weights are those of one process.

    If the number of microbatches is a power of two, dividing by it is exact; if the order of sums
    is the same as well, two whole steps must be equal bit for bit. Otherwise one step must be equal
    within float32 rounding; its weights on average only, since Adam divides by the gradient's size
    and so makes much of the rounding of a gradient that is nearly zero.

    Args:
        work: as the peer has it.
        expected: of one process.
        peer: built just now, of watched work.
        watch: that watches.

    Returns:
        Whether they are equal to the bit.
    """
    exact = peer.same_order and work.num_microbatches & (work.num_microbatches - 1) == 0
    after = expected[: 2 if exact else 1]
    losses = peer.train([(work.inputs, work.targets)] * len(after))
    if peer.shares:
        losses = [_sum_over_ranks(loss) for loss in losses]
    for measured, then in zip(losses, after, strict=True):
        if measured is not None:
            _assert_same("loss", measured, then.loss, exact)
    last = after[-1]
    for index, layer in zip(peer.indices, peer.part, strict=True):
        for ours, theirs in zip(watch.gradients(layer), last.gradients[index], strict=True):
            _assert_same(f"a gradient of layer {index}", ours, theirs, exact)
        for weight, other in zip(layer.parameters(), last.weights[index], strict=True):
            if exact:
                _assert_same(f"an updated weight of layer {index}", weight.detach(), other, exact)
            else:
                assert (weight - other).abs().mean() < 1e-6, f"the weights of layer {index} differ"
    watch.end()
    return exact


def _sum_over_ranks(loss: Tensor | None) -> Tensor | None:
    if loss is not None:
        loss = loss.clone()
        dist.all_reduce(loss)
    return loss


def _assert_same(what: str, measured: Tensor | None, expected: Tensor | None, exact: bool) -> None:
    rtol, atol = (0.0, 0.0) if exact else (1e-4, 1e-6)
    torch.testing.assert_close(
        measured, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


@contextmanager
def two_ranks() -> Iterator[int]:
    """Join the gloo group that torchrun prepared, one thread per rank; gives this rank.

    The allocator keeps freed pages, as Penstock has it: the same setting for everybody.
    """
    if int(os.environ.get("WORLD_SIZE", "0")) != 2:
        sys.exit("run it with: torchrun --nproc-per-node=2 -m benchmarks.ROOM.NAME")
    torch.set_num_threads(1)
    keep_freed_pages()
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
