"""What a training step takes beyond its layers: ops, messages and updates."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.microbatch_graph import MicrobatchGraph, cut, edges, sent
from penstock.profiler.chain import num_bytes
from penstock.profiler.clock import Clock

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Adam keeps two numbers per parameter; assumed where no optimizer is given to measure.
_ASSUMED_STATE_PER_PARAMETER = 2
_BEYOND_CACHES = 256 * 2**20


_GRADIENT_BYTES = 32 * 2**20


class Update(NamedTuple):
    """One optimizer step on a layer's parameters, and the bytes of its state for them."""

    seconds: float
    state_bytes: int


def measure_updates(
    modules: Sequence[nn.Module], optimizer: OptimizerFactory | None, clock: Clock, repeats: int = 3
) -> list[Update]:
    """Time the optimizer's step of every layer, on copies of the parameters.

    In a training step the caches hold something else when an update begins. So layers take turns,
    as many at a time as caches cannot hold, but no more, since copies take memory.
    """
    if optimizer is None:
        return [
            Update(0.0, _ASSUMED_STATE_PER_PARAMETER * num_bytes(_trained(module)))
            for module in modules
        ]
    return [
        update
        for group in _groups(modules)
        for update in _measure_group(group, optimizer, clock, repeats)
    ]


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _groups(modules: Sequence[nn.Module]) -> Iterator[list[list[nn.Parameter]]]:
    group: list[list[nn.Parameter]] = []
    for module in modules:
        group.append(_trained(module))
        if num_bytes(group) >= _BEYOND_CACHES:
            yield group
            group = []
    yield group


def _measure_group(
    group: list[list[nn.Parameter]], optimizer: OptimizerFactory, clock: Clock, repeats: int
) -> list[Update]:
    built = [_on_copies(parameters, optimizer) for parameters in group]
    laps: list[list[tuple[Any, Any]]] = [[] for _ in group]
    for _ in range(repeats):
        for one, own in zip(built, laps, strict=True):
            if one is not None:
                start = clock.now()
                one.step()
                own.append((start, clock.now()))
    clock.settle()
    return [
        Update(0.0, 0)
        if one is None
        else Update(
            statistics.median(clock.seconds(*lap) for lap in own),
            num_bytes([list(entry.values()) for entry in one.state.values()]),
        )
        for one, own in zip(built, laps, strict=True)
    ]


def _on_copies(
    parameters: list[nn.Parameter], optimizer: OptimizerFactory
) -> torch.optim.Optimizer | None:
    if not parameters:
        return None
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    built = optimizer(copies)
    built.step()  # allocates its state
    return built


def measure_op(clock: Clock, device: torch.device, repeats: int = 100) -> float:
    """Seconds of one op of a stage whose layers do nothing: half of a forward and a backward."""
    value, laps = torch.zeros(16, 16, device=device), []
    gradients: list[Tensor | None] = [torch.ones_like(value)]
    for _ in range(repeats):
        start = clock.now()
        leaves, inside = cut(value, True)
        graph = MicrobatchGraph(leaves, {}, edges(inside), {}, False, None)
        sent(inside, 0)
        del inside
        graph.backward(gradients, {})
        laps.append((start, clock.now()))
    clock.settle()
    return statistics.median(clock.seconds(*lap) for lap in laps) / 2


def measure_hand_over(repeats: int = 200) -> float:
    """Seconds from one thread handing a message to another until that one runs."""
    there: queue.SimpleQueue[float] = queue.SimpleQueue()
    back: queue.SimpleQueue[float] = queue.SimpleQueue()

    def answer() -> None:
        for _ in range(repeats):
            back.put(there.get())

    thread = threading.Thread(target=answer)
    thread.start()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        there.put(start)
        back.get()
        times.append((time.perf_counter() - start) / 2)
    thread.join()
    return statistics.median(times)


def measure_sum(clock: Clock, device: torch.device, repeats: int = 5) -> float:
    """Bytes of gradients per second that are summed with those of another holder, as replicas do
    it: into a tensor of their own."""
    own, other = (torch.zeros(_GRADIENT_BYTES // 4, device=device) for _ in range(2))
    laps = []
    for _ in range(repeats + 1):
        start = clock.now()
        sum([other], own.clone())
        laps.append((start, clock.now()))
    clock.settle()
    return _GRADIENT_BYTES / statistics.median(clock.seconds(*lap) for lap in laps[1:])
