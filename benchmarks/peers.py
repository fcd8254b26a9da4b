"""What Penstock is measured against: torch's own pipelines, and one process, on the same work.

Two ranks, one thread each, gloo. Every peer is built from the same ``Work`` and is stepped alike,
so a benchmark can take turns between them, and Penstock's pipeline, inside one job::

    torchrun --nproc-per-node=2 benchmarks/peers.py

Run so, it proves that each peer's loss and gradients are those of one process, then prints seconds
per step. torch's schedules run at their best: with shapes given in advance (no dry run), without
collecting the outputs, and with the microbatches' gradients scaled as Penstock does.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from penstock.demo import GPT, Corpus, loss

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor], "Tensor | None"]


@dataclass(frozen=True)
class Work:
    """The same training step for everybody.

    Attributes:
        name: for people.
        build_model: gives the same weights every time; the model has a ``spine()`` or is an
            ``nn.Sequential``.
        cut: how many layers of the spine rank 0 runs.
        loss: the mean over one microbatch.
        num_microbatches: divides the rows of the minibatch.
        build_optimizer: for the parameters that a rank holds.
        inputs, targets: one minibatch; every later one has these shapes.
    """

    name: str
    build_model: Callable[[], nn.Module]
    cut: int
    loss: Loss
    num_microbatches: int
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    inputs: Tensor
    targets: Tensor

    def layers(self) -> list[nn.Module]:
        """The spine of a newly built model."""
        model = self.build_model()
        return list(model) if isinstance(model, nn.Sequential) else model.spine()


@dataclass(frozen=True)
class Peer:
    """One way to do the work.

    Attributes:
        part: the layers that this rank holds.
        step: ``(inputs, targets) -> loss``: forget the old gradients, compute those of one
            minibatch, update. The mean loss on the last rank, None on the others.
    """

    part: nn.Sequential
    step: Step


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
        return torch.stack(losses).mean()

    return _peer(work, model, backward)


def torch_gpipe(work: Work) -> Peer:
    """``torch.distributed.pipelining.ScheduleGPipe``; needs a process group of two ranks."""
    return _torch_peer(work, ScheduleGPipe)


def torch_1f1b(work: Work) -> Peer:
    """``torch.distributed.pipelining.Schedule1F1B``; needs a process group of two ranks."""
    return _torch_peer(work, Schedule1F1B)


PEERS: dict[str, Callable[[Work], Peer]] = {
    "torch GPipe": torch_gpipe,
    "torch 1F1B": torch_1f1b,
}


def check_same_as_one_process(work: Work, build: Callable[[Work], Peer]) -> None:
    """Assert that loss and gradients equal those of the unpartitioned model. Call it on every rank.

    If the number of microbatches is a power of two, dividing by it is exact and the order of
    accumulation is the same: then two whole steps must be equal bit for bit, updated parameters
    included. Otherwise one step's loss and gradients are, within float32 rounding; what an
    optimizer makes of that rounding (Adam divides by the gradient's size) has no such bound.
    """
    single, peer = one_process(work), build(work)
    mine = slice(0, work.cut) if dist.get_rank() == 0 else slice(work.cut, None)
    reference = list(single.part[mine].parameters())
    exact = work.num_microbatches & (work.num_microbatches - 1) == 0
    for _ in range(2 if exact else 1):
        expected = single.step(work.inputs, work.targets)
        measured = peer.step(work.inputs, work.targets)
        if measured is not None:
            _assert_same("loss", measured, expected, exact)
        for index, (a, b) in enumerate(zip(peer.part.parameters(), reference, strict=True)):
            _assert_same(f"gradient of parameter {index}", a.grad, b.grad, exact)
            if exact:
                _assert_same(f"updated parameter {index}", a, b, exact)


@contextmanager
def two_ranks() -> Iterator[int]:
    """Join the gloo group that torchrun prepared, one thread per rank; gives this rank."""
    if int(os.environ.get("WORLD_SIZE", "0")) != 2:
        sys.exit("run it with: torchrun --nproc-per-node=2 " + " ".join(sys.argv))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def gpt_work(num_microbatches: int = 8, rows: int = 2) -> Work:
    """The demonstration GPT on the standard library's source: 12 ms forward per stage."""

    def build() -> GPT:
        torch.manual_seed(0)
        return GPT()

    inputs, targets = next(Corpus.standard_library().batches(num_microbatches * rows, 48))
    return Work("GPT", build, 5, loss, num_microbatches, torch.optim.AdamW, inputs, targets)


def tiny_work(num_microbatches: int = 8, rows: int = 24, width: int = 256) -> Work:
    """A small perceptron, a fifth of a millisecond per stage: what is left is overhead."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        pairs = ((nn.Linear(width, width), nn.ReLU()) for _ in range(8))
        return nn.Sequential(*itertools.chain.from_iterable(pairs))

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_microbatches * rows, width, generator=generator)
    targets = torch.randn(num_microbatches * rows, width, generator=generator)
    mean_square = nn.functional.mse_loss
    return Work("tiny", build, 8, mean_square, num_microbatches, torch.optim.SGD, inputs, targets)


def time_in_turns(
    work: Work, steps: dict[str, Step], *, rounds: int, steps_per_round: int
) -> dict[str, float]:
    """Median seconds per step of each, taking turns so that all meet the same machine.

    Every round runs each one's steps in a row, between barriers; the first round warms up and does
    not count. All ranks must name the same steps in the same order.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1, rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps_per_round):
                step(work.inputs, work.targets)
            dist.barrier()
            if turn >= 0:
                seconds[name].append((time.perf_counter() - start) / steps_per_round)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _torch_peer(work: Work, family: type[ScheduleGPipe] | type[Schedule1F1B]) -> Peer:
    rank, device = dist.get_rank(), torch.device("cpu")
    layers = work.layers()
    part = nn.Sequential(*(layers[: work.cut] if rank == 0 else layers[work.cut :]))
    microbatch = work.inputs.chunk(work.num_microbatches)[0]
    with torch.no_grad():
        hidden = nn.Sequential(*layers[: work.cut])(microbatch)
        outputs = nn.Sequential(*layers[work.cut :])(hidden)
    hidden, outputs = hidden.requires_grad_(), outputs.requires_grad_()
    arguments = (microbatch, hidden) if rank == 0 else (hidden, outputs)
    stage = PipelineStage(part, rank, 2, device, arguments[0], arguments[1])
    schedule = family(stage, work.num_microbatches, loss_fn=work.loss)

    def backward(inputs: Tensor, targets: Tensor) -> Tensor | None:
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().mean()

    return _peer(work, part, backward)


def _peer(work: Work, part: nn.Sequential, backward: Step) -> Peer:
    optimizer = work.build_optimizer(part.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        optimizer.zero_grad()
        value = backward(inputs, targets)
        optimizer.step()
        return value

    return Peer(part, step)


def _assert_same(what: str, measured: Tensor | None, expected: Tensor | None, exact: bool) -> None:
    rtol, atol = (0.0, 0.0) if exact else (1e-4, 1e-6)
    torch.testing.assert_close(
        measured, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


def _alone(work: Work, peer: Peer, rank: int) -> Step:
    """Step on rank 0 while the other waits at the barrier: one process, one core."""
    return peer.step if rank == 0 else lambda inputs, targets: None


def main() -> None:
    """Check, then time, every peer on both pieces of work."""
    with two_ranks() as rank:
        for work, repeats in ((gpt_work(), 2), (tiny_work(), 50)):
            for build in PEERS.values():
                check_same_as_one_process(work, build)
            steps = {"one process": _alone(work, one_process(work), rank)}
            steps |= {name: build(work).step for name, build in PEERS.items()}
            seconds = time_in_turns(work, steps, rounds=5, steps_per_round=repeats)
            for name, value in seconds.items():
                speedup = seconds["one process"] / value
                if rank == 0:
                    print(f"{work.name:5} {name:12} {value:9.5f} s per step, {speedup:.2f}×")


if __name__ == "__main__":
    main()
