"""Measure a model layer by layer, in place.

Layers are timed where they stand in a training step, not replayed one by one: caches and allocator
are then in the state they have in training. Between layers the graph is cut, as between stages, so
the backward of each layer can be timed by itself. Nothing of the model is changed: gradients,
buffers, random state and thread settings are restored.
"""

from __future__ import annotations

import platform
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock import microbatches, tree
from penstock.allocator import keep_freed_pages
from penstock.errors import InputError, ModelError
from penstock.footprint import measure_footprints
from penstock.graph import Layer, LayerGraph
from penstock.replay import put_back, saved_buffers
from penstock.spine import NamedLayer, Skip, run_layer, spine_of

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Progress = Callable[[int, int], None]
Run = Callable[[Any], Any]

_WARM_UP = 2
# Adam keeps two numbers per parameter; assumed where no optimizer is given to measure.
_ASSUMED_STATE_PER_PARAMETER = 2


def profile(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    targets: Any = None,
    optimizer: OptimizerFactory | None = None,
    repeats: int = 7,
    num_threads: int = 1,
    progress: Progress | None = None,
) -> LayerGraph:
    """Measure every layer of ``model`` on one microbatch.

    Args:
        model: an ``nn.Sequential``, or a module with a ``spine`` (see ``penstock.spine``). It is
            measured in the mode it is in (training, unless ``eval()`` was called).
        inputs: one microbatch, rows first: a tensor or nested tensors.
        loss, targets: if both are given, the last layer's times include the loss.
        optimizer: if given, ``update_seconds`` and ``optimizer_bytes`` are measured; otherwise the
            update takes 0 s and the state of Adam is assumed.
        repeats: measurements per time, of which the median is taken.
        num_threads: intra-op threads; use what one worker will have.
        progress: called with (done, total) passes.

    Returns:
        The profile: seconds per microbatch, bytes per microbatch.

    Raises:
        ModelError: the model cannot be cut, or a layer fails on its input.
        InputError: impossible arguments.
    """
    layers = spine_of(model)
    rows = microbatches.num_rows(inputs, "inputs")
    if repeats < 1 or num_threads < 1:
        raise InputError(f"repeats ({repeats}) and num_threads ({num_threads}) must be ≥ 1")
    if (loss is None) != (targets is None):
        raise InputError("give loss and targets together, or neither")
    keep_freed_pages()
    runs = _runs(layers, loss, targets)
    with _undisturbed(model, num_threads):
        footprints = measure_footprints([layer.module for layer in layers], runs, inputs)
        passes = _Passes(layers, runs, inputs)
        passes.repeat(repeats, progress)
        updates = [_measure_update(layer.module, optimizer) for layer in layers]
        hop_seconds = measure_hand_over()
    measured = zip(layers, passes.medians(), footprints, updates, strict=True)
    return LayerGraph(
        layers=tuple(
            Layer(
                name=layer.name,
                kind=type(layer.module).__name__,
                forward_seconds=forward,
                backward_input_seconds=backward_input,
                backward_weight_seconds=backward_weight,
                update_seconds=update,
                activation_bytes=footprint.activation,
                held_input_bytes=footprint.held_input,
                weight_kept_bytes=footprint.weight_kept,
                output_bytes=footprint.output,
                parameter_bytes=_num_bytes(layer.module.parameters()),
                optimizer_bytes=state,
                signature=layer.signature,
            )
            for layer, (forward, backward_input, backward_weight), footprint, (
                update,
                state,
            ) in measured
        ),
        microbatch_size=rows,
        input_bytes=_num_bytes(tree.tensors(inputs)),
        hop_seconds=hop_seconds,
        num_threads=num_threads,
        device=f"{platform.machine()} CPU, torch {torch.__version__}",
    )


def _runs(
    layers: Sequence[NamedLayer], loss: Callable[[Any, Any], Tensor] | None, targets: Any
) -> list[Run]:
    """The layers as functions that name themselves when they fail; the last goes on to the loss."""
    runs: list[Run] = [partial(_run_between_cuts, layer) for layer in layers]
    if loss is not None:
        last = runs[-1]
        runs[-1] = lambda value: loss(_without_skips(last(value)), targets)
    return [partial(_run_named, layer, run) for layer, run in zip(layers, runs, strict=True)]


class _WithSkips(NamedTuple):
    """What crosses a cut while skips are open."""

    value: Any
    skips: dict[str, Skip]


def _run_between_cuts(layer: NamedLayer, value: Any) -> Any:
    """A cut must find every open skip, so they travel with the value."""
    skips = dict(value.skips) if isinstance(value, _WithSkips) else {}
    output = run_layer(layer, _without_skips(value), skips)
    return _WithSkips(output, skips) if skips else output


def _without_skips(value: Any) -> Any:
    return value.value if isinstance(value, _WithSkips) else value


def _run_named(layer: NamedLayer, run: Run, value: Any) -> Any:
    try:
        return run(value)
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tree.tensors(value))
        raise ModelError(
            f"layer {layer.name!r} ({type(layer.module).__name__}) failed on an input of shape "
            f"{shapes}: {type(error).__name__}: {error}"
        ) from error


class _Passes:
    """Repeated passes through the model, and the seconds of every layer in each."""

    def __init__(self, layers: Sequence[NamedLayer], runs: Sequence[Run], inputs: Any) -> None:
        self._layers = layers
        self._runs = runs
        self._inputs = inputs
        count = len(layers)
        self.forward: list[list[float]] = [[] for _ in range(count)]
        self.backward: list[list[float]] = [[] for _ in range(count)]
        self.backward_input: list[list[float]] = [[] for _ in range(count)]

    def repeat(self, repeats: int, progress: Progress | None) -> None:
        """Alternate full backwards and input-only backwards; forget the warm-up."""
        total = _WARM_UP + repeats
        for index in range(total):
            if index == _WARM_UP:
                for times in (*self.forward, *self.backward, *self.backward_input):
                    times.clear()
            self._one_pass(full=True)
            self._one_pass(full=False)
            if progress is not None:
                progress(index + 1, total)

    def _one_pass(self, full: bool) -> None:
        borders, value = [], self._inputs
        for index, run in enumerate(self._runs):
            leaves, value = _cut(value, index)
            start = time.perf_counter()
            value = run(value)
            self.forward[index].append(time.perf_counter() - start)
            borders.append((leaves, tree.tensors(value)))
        times = self.backward if full else self.backward_input
        gradients: list[Tensor | None] = [torch.ones_like(tensor) for tensor in borders[-1][1]]
        for index in reversed(range(len(borders))):
            leaves, outputs = borders.pop()
            start = time.perf_counter()
            gradients = _backward(leaves, outputs, gradients, full)
            seconds = time.perf_counter() - start
            # Where there is nothing to do, finding that out is no cost of the layer.
            times[index].append(seconds if full or any(g is not None for g in gradients) else 0.0)

    def medians(self) -> Iterator[tuple[float, float, float]]:
        """(forward, backward-input, backward-weight) seconds of every layer."""
        for layer, forward, full, inputs in zip(
            self._layers, self.forward, self.backward, self.backward_input, strict=True
        ):
            backward = statistics.median(full)
            trains = any(parameter.requires_grad for parameter in layer.module.parameters())
            backward_input = min(statistics.median(inputs), backward) if trains else backward
            yield statistics.median(forward), backward_input, backward - backward_input


def _cut(value: Any, index: int) -> tuple[list[Any], Any]:
    """(the leaves where gradients will be, the input) of a layer; the first wants no gradient."""
    leaves, structure = tree.flatten(value)
    pairs = [tree.cut(leaf, wants_gradient=index > 0) for leaf in leaves]
    inputs = [pair[1] for pair in pairs]
    if index == 0:  # it may overwrite its input, which the caller still needs
        inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in inputs]
    return [pair[0] for pair in pairs], tree.unflatten(inputs, structure)


def _backward(
    leaves: Sequence[Any],
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    full: bool,
) -> list[Tensor | None]:
    """The gradients of a layer's input, by a full backward or by one that skips the weights."""
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    wanted = [leaf for leaf in inputs if leaf.requires_grad]
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    if pairs and full:
        torch.autograd.backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        return [leaf.grad for leaf in inputs]
    found: Sequence[Tensor | None] = ()
    if pairs and wanted:
        found = torch.autograd.grad(
            [pair[0] for pair in pairs], wanted, [pair[1] for pair in pairs], allow_unused=True
        )
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=False)}
    return [by_leaf.get(id(leaf)) for leaf in inputs]


def _measure_update(
    module: nn.Module, optimizer: OptimizerFactory | None, repeats: int = 3
) -> tuple[float, int]:
    """(seconds of one optimizer step, bytes of its state), measured on a copy."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if optimizer is None or not trained:
        return 0.0, _ASSUMED_STATE_PER_PARAMETER * _num_bytes(trained)
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in trained]
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    built = optimizer(copies)
    built.step()  # allocates its state
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        built.step()
        times.append(time.perf_counter() - start)
    state = [value for entry in built.state.values() for value in entry.values()]
    return statistics.median(times), _num_bytes(v for v in state if isinstance(v, Tensor))


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


@contextmanager
def _undisturbed(model: nn.Module, num_threads: int) -> Iterator[None]:
    """Restore gradients, buffers, random state and threads afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = saved_buffers(model.modules())
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        torch.set_num_threads(threads)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        put_back(buffers)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
