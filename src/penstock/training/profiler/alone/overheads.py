"""The seconds of a training step beyond its layers: ops, messages and updates."""

from __future__ import annotations

import mmap
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.engine.masters import gradient_dtype
from penstock.engine.model.optimizer_factory import OptimizerFactory, Parameters, make_optimizer
from penstock.engine.model.spine import NamedLayer
from penstock.engine.stage.microbatch_graph import MicrobatchGraph, cut, edges, sent
from penstock.training.profiler.alone.conditions import Clock
from penstock.training.profiler.alone.passes import num_bytes

# Adam keeps two numbers per parameter; assumed where no optimizer is given to measure.
_ASSUMED_STATE_PER_PARAMETER = 2
_BEYOND_CACHES = 256 * 2**20
_GRADIENT_BYTES = 32 * 2**20


class Update(NamedTuple):
    """An optimizer step on a layer's parameters: its time, and the bytes of its state.

    Attributes:
        gradient_bytes: of the gradients that it takes; ``None`` for those of their parameters.
    """

    seconds: float
    state_bytes: int
    gradient_bytes: int | None = None


class SteppedOptimizer(NamedTuple):
    """An optimizer that has stepped, and so has its state.

    Attributes:
        optimizer: of some parameters.
        gradients: that it takes, with whose they are: some optimizers take them away.
    """

    optimizer: torch.optim.Optimizer
    gradients: Sequence[tuple[nn.Parameter, Tensor]]

    def give_gradients(self) -> None:
        """Before another step."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that it takes."""
        return num_bytes([gradient for _, gradient in self.gradients])

    @property
    def state_bytes(self) -> int:
        """Of all that it keeps."""
        return num_bytes([list(entry.values()) for entry in self.optimizer.state.values()])


NamedParameters = list[tuple[str, nn.Parameter]]
"""Parameters by their names in the model."""


class OptimizerBuilder(NamedTuple):
    """Makes an optimizer of the parameters of each layer.

    Attributes:
        make: of any parameters.
        refusals: of layers of which it cannot be made.
    """

    make: OptimizerFactory
    refusals: list[InputError]

    def stepped(
        self,
        named: NamedParameters,
        prepare: Callable[[torch.optim.Optimizer], None] = lambda _: None,
    ) -> SteppedOptimizer | None:
        """An optimizer with its state, of copies of parameters; ``None`` if there are none, or if
        it refuses them, which joins ``refusals``.

        Args:
            prepare: called with it before its first step.
        """
        if not named:
            return None
        try:
            return _stepped(named, self.make, prepare)
        except InputError as error:
            self.refusals.append(InputError(str(error)))  # without the frames that have the copies
            return None


def updates_of(
    layers: Sequence[NamedLayer],
    optimizer: OptimizerFactory | None,
    look: Callable[[Sequence[NamedParameters], OptimizerBuilder], Iterable[Update]],
) -> list[Update]:
    """The optimizer's step of every layer; where nobody names an optimizer, no time, and the state
    of Adam.

    Args:
        look: finds it for the parameters that learn, layer by layer.

    Raises:
        InputError: no layer has parameters of which the optimizer can be made.
    """
    trained = [
        [
            (layer.key(name), parameter)
            for name, parameter in layer.module.named_parameters()
            if parameter.requires_grad
        ]
        for layer in layers
    ]
    if optimizer is None:
        sizes = (num_bytes([weight for _, weight in named]) for named in trained)
        return [Update(0.0, _ASSUMED_STATE_PER_PARAMETER * size) for size in sizes]
    builder = OptimizerBuilder(optimizer, [])
    updates = [*look(trained, builder)]
    # A layer alone may have nothing that the optimizer wants, as matrices.
    if builder.refusals and len(builder.refusals) == sum(map(bool, trained)):
        raise builder.refusals[0]
    return updates


def measure_updates(
    layers: Sequence[NamedLayer], optimizer: OptimizerFactory | None, clock: Clock, repeats: int = 3
) -> list[Update]:
    """Time the optimizer's step of every layer, on copies of the parameters.

    In a training step the caches hold something else when an update begins. So layers take turns,
    as many at a time as caches cannot hold, but no more, since copies take memory.

    Raises:
        InputError: no layer has parameters of which the optimizer can be made.
    """

    def look(trained: Sequence[NamedParameters], builder: OptimizerBuilder) -> Iterator[Update]:
        for group in _groups(trained):
            yield from _measure_group([builder.stepped(own) for own in group], clock, repeats)

    return updates_of(layers, optimizer, look)


def _groups(trained: Iterable[NamedParameters]) -> Iterator[list[NamedParameters]]:
    group: list[NamedParameters] = []
    for own in trained:
        group.append(own)
        if num_bytes([weight for named in group for _, weight in named]) >= _BEYOND_CACHES:
            yield group
            group = []
    yield group


def _measure_group(
    built: Sequence[SteppedOptimizer | None], clock: Clock, repeats: int
) -> list[Update]:
    laps: list[list[tuple[Any, Any]]] = [[] for _ in built]
    for _ in range(repeats):
        for stepped, own in zip(built, laps, strict=True):
            if stepped is not None:
                stepped.give_gradients()
                start = clock.now()
                stepped.optimizer.step()
                own.append((start, clock.now()))
    clock.settle()
    return [
        Update(0.0, 0)
        if stepped is None
        else Update(
            statistics.median(clock.seconds(*lap) for lap in own),
            stepped.state_bytes,
            stepped.gradient_bytes,
        )
        for stepped, own in zip(built, laps, strict=True)
    ]


def _stepped(
    named: NamedParameters,
    optimizer: OptimizerFactory,
    prepare: Callable[[torch.optim.Optimizer], None],
) -> SteppedOptimizer:
    copies = [(name, nn.Parameter(parameter.detach().clone())) for name, parameter in named]
    built = make_optimizer(optimizer, Parameters(copies), f"the layer of {named[0][0]}")
    for _, copy in copies:
        copy.grad = torch.full_like(copy, 1e-3, dtype=gradient_dtype(copy))
    taken = [own for group in built.param_groups for own in group["params"]]
    gradients = [(own, own.grad) for own in taken if own.grad is not None]
    prepare(built)
    try:
        built.step()  # allocates its state
    except Exception as error:
        raise InputError(
            f"{type(built).__name__} cannot update the layer of {named[0][0]}: "
            f"{type(error).__name__}: {error}; take another optimizer, or leave it out: then the "
            "state of Adam is assumed"
        ) from error
    return SteppedOptimizer(built, gradients)


def measure_op(clock: Clock, device: torch.device, repeats: int = 100) -> float:
    """Measure the seconds of an op of a stage whose layers do nothing."""
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
    """Measure the seconds from a thread handing a message to another until that one runs."""
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
    """Measure how many bytes of gradients per second are summed with those of another holder, as
    replicas do it: into a tensor of their own."""
    own, other = (torch.zeros(_GRADIENT_BYTES // 4, device=device) for _ in range(2))
    laps = []
    for _ in range(repeats + 1):
        start = clock.now()
        sum([other], own.clone())
        laps.append((start, clock.now()))
    clock.settle()
    return _GRADIENT_BYTES / statistics.median(clock.seconds(*lap) for lap in laps[1:])


def measure_moving(rounds: int = 7) -> float:
    """Measure how many bytes another thread adds up and moves until what is computed meanwhile has
    lost a second, as the threads of stages that come and go do it; 0 if nothing is lost.

    What is multiplied is read from memory each time, like weights of stages that come and go.
    """
    rows, weights = torch.ones(_ROWS, _FEATURES), torch.ones(_FEATURES, 2 * _FEATURES)
    moving = _Moving()
    alone, beside, speeds = [], [], []
    for _ in range(rounds):
        alone.append(_products_per_second(rows, weights))
        with moving as mover:
            beside.append(_products_per_second(rows, weights))
        speeds.append(mover.bytes_per_second)
    lost = 1.0 - statistics.median(beside) / statistics.median(alone)
    return statistics.median(speeds) / lost if lost > 0 else 0.0


_ROWS, _FEATURES = 128, 1024
_LAP_SECONDS = 0.03


def _products_per_second(rows: Tensor, weights: Tensor) -> float:
    start, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < _LAP_SECONDS:
        rows.mm(weights)
        count += 1
    return count / seconds


class _Moving:
    """A thread that adds up memory and copies it, for as long as it is entered.

    Attributes:
        bytes_per_second: that it has moved when it was entered last.
    """

    def __init__(self) -> None:
        self._source = np.ones(_GRADIENT_BYTES // 8, np.uint64)
        self._target = np.empty_like(self._source)
        self._ended = threading.Event()
        self._thread = threading.Thread()
        self.bytes_per_second = 0.0

    def __enter__(self) -> Self:
        self._ended.clear()
        self._thread = threading.Thread(target=self._move, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _move(self) -> None:
        start, moved, size = time.perf_counter(), 0, _MOVED_BYTES // 8
        while not self._ended.is_set():
            first = moved // 8 % len(self._source)
            piece = self._source[first : first + size]
            np.add.reduce(piece.reshape(-1, 512), axis=1)
            np.copyto(self._target[first : first + size], piece)
            moved += _MOVED_BYTES
        self.bytes_per_second = moved / (time.perf_counter() - start)


_MOVED_BYTES = 4 * 2**20


def measure_new_pages(repeats: int = 5) -> float:
    """Measure how many bytes of new memory the system makes pages of in a second, beyond what it
    takes to write to them."""
    laps = []
    for _ in range(repeats):
        own = np.frombuffer(mmap.mmap(-1, _GRADIENT_BYTES, **_PRIVATE), np.uint64)
        start = time.perf_counter()
        own.fill(1)
        middle = time.perf_counter()
        own.fill(2)
        laps.append(2 * middle - start - time.perf_counter())
    seconds = statistics.median(laps)
    return _GRADIENT_BYTES / seconds if seconds > 0 else 0.0


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""As allocators ask for memory."""
