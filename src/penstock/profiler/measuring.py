"""``profile``: from a model and a sample to a ``LayerGraph``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec.structs import replace
from torch import nn

from penstock.allocator import keep_freed_pages
from penstock.errors import InputError
from penstock.graph import Layer, LayerGraph
from penstock.profiler.bench import Bench, Measured, Progress
from penstock.profiler.chain import Loss, num_bytes
from penstock.profiler.conditions import device_of, name_of, software, undisturbed
from penstock.profiler.neighbours import neighbours_of
from penstock.profiler.overheads import (
    OptimizerFactory,
    Update,
    measure_hand_over,
    measure_op,
    measure_sum,
    measure_updates,
)
from penstock.profiler.sample import Sample
from penstock.spine import NamedLayer, spine_of
from penstock.values import is_whole


def profile(  # noqa: PLR0913 - each has a default that most callers keep
    model: nn.Module,
    inputs: Any,
    *,
    loss: Loss | None = None,
    targets: Any = None,
    optimizer: OptimizerFactory | None = None,
    repeats: int = 7,
    sizes: Sequence[int] = (),
    num_threads: int = 1,
    busy_cores: int | None = None,
    progress: Progress | None = None,
) -> LayerGraph:
    """Measure every layer of ``model`` on one microbatch, on the device that it is on.

    All seconds are medians over rounds, after a warm-up; in each round every kind of pass has its
    turn. Layers are timed where they stand, with the graph cut between them, and say how the time
    divides; how much it is in all, passes without cuts say. What measuring takes is measured, too,
    and taken off.

    A backward is split as a stage splits it (``penstock.deferral``). ``backward_input_seconds`` (I)
    is what its first half takes: input gradients, and those weight gradients that nothing puts off.
    ``backward_weight_seconds`` (W) is the rest of a whole backward B, so that I + W = B. What both
    halves, and the forward that prepares for them, really take beyond a forward and B is
    ``split_seconds``. ``recompute_seconds`` is a second forward, behind one that kept nothing.

    Nothing of the model is changed: gradients, buffers, random state and threads are restored.

    Args:
        model: an ``nn.Sequential``, or a module with a ``spine`` (see ``penstock.spine``); any
            other is captured (``penstock.tracing``). It is measured in the mode it is in (training,
            unless ``eval()`` was called).
        inputs: one microbatch, rows first: a tensor or nested tensors, on the model's device.
        loss, targets: if both are given, the last layer's times include the loss.
        optimizer: if given, ``update_seconds`` and ``optimizer_bytes`` are measured; otherwise the
            update takes 0 s and the state of Adam is assumed.
        repeats: rounds that count, at least 1.
        sizes: other microbatch sizes to measure, each at most the rows of ``inputs``, of which the
            first ones are taken; they become ``other_sizes``.
        num_threads: intra-op threads; use what one worker will have.
        busy_cores: how many other cores to keep busy for ``contention``: threads train copies of
            the model there. By default all that are left, at most 7; 0 leaves it at 1. On an
            accelerator it is always 1.
        progress: called with (done, total) rounds.

    Returns:
        The profile: seconds per microbatch, bytes per microbatch.

    Raises:
        ModelError: the model cannot be cut, or a layer fails on its input.
        InputError: impossible arguments, or a model and inputs on several devices.
    """
    _check(repeats, num_threads, busy_cores)
    sample = Sample(inputs, targets, loss)
    others = [sample.of(size) for size in sorted({*sizes} - {sample.num_rows})]
    model = _in_layers(model, inputs)
    layers = spine_of(model)
    device = device_of(model, inputs)
    keep_freed_pages()
    with undisturbed(model, num_threads, device), ExitStack() as stack:
        bench = Bench(layers, device, repeats, 1 + len(others), progress)
        neighbours = neighbours_of(layers, sample, num_threads, busy_cores, device)
        measured, contention = bench.measure(sample, stack.enter_context(neighbours))
        if neighbours.failure is not None:
            contention = 1.0
            flag = f"contention was not measured: {neighbours.failure}"
            measured[0] = measured[0]._replace(flags=(*measured[0].flags, flag))
        updates = measure_updates([layer.module for layer in layers], optimizer, bench.clock)
        graph = LayerGraph(
            layers=tuple(_layers(model, layers, measured, updates)),
            microbatch_size=sample.num_rows,
            input_bytes=num_bytes(inputs),
            hop_seconds=measure_hand_over(),
            op_seconds=measure_op(bench.clock, device),
            sum_bytes_per_second=measure_sum(bench.clock, device),
            contention=contention,
            num_threads=num_threads,
            device=name_of(device),
            dtype=", ".join(sorted({str(one.dtype)[6:] for one in model.parameters()})),
            software=software(device),
        )
        sized = tuple(_with_sample(graph, bench, other) for other in others)
    return replace(graph, other_sizes=sized)


def _check(repeats: int, num_threads: int, busy_cores: int | None) -> None:
    if repeats < 1 or num_threads < 1:
        raise InputError(f"repeats ({repeats}) and num_threads ({num_threads}) must be ≥ 1")
    if busy_cores is not None and (not is_whole(busy_cores) or busy_cores < 0):
        raise InputError(f"busy_cores is {busy_cores!r}, but must be a whole number ≥ 0")


def _in_layers(model: nn.Module, inputs: Any) -> nn.Module:
    """A model that has a spine."""
    chained = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    if chained or hasattr(model, "spine") or not isinstance(model, nn.Module):
        return model
    # Tracing takes seconds to import, and few models need it.
    from penstock.tracing import capture

    return capture(model, inputs)


def _layers(
    model: nn.Module,
    layers: Sequence[NamedLayer],
    measured: Sequence[Measured],
    updates: Sequence[Update],
) -> Iterator[Layer]:
    shared = _shared(model, layers)
    before = ""
    for layer, found, update in zip(layers, measured, updates, strict=True):
        module = layer.module
        reads: tuple[str, ...] | None = getattr(module, "reads", None)
        own = {id(parameter) for parameter in module.parameters()}
        blank = Layer(
            name=layer.name,
            kind=getattr(module, "kind", type(module).__name__),
            forward_seconds=0.0,
            backward_input_seconds=0.0,
            backward_weight_seconds=0.0,
            update_seconds=update.seconds,
            parameter_bytes=num_bytes(list(module.parameters())),
            buffer_bytes=num_bytes(list(module.buffers())),
            optimizer_bytes=update.state_bytes,
            inputs=None if reads is None else tuple(name for name in reads if name == before),
            after=tuple(name for name in reads or () if name != before),
            shared_parameters={name: one.nbytes for name, one in shared.items() if id(one) in own},
            signature=layer.signature,
        )
        before = layer.name
        yield _with_costs(blank, found)


def _with_costs(blank: Layer, found: Measured) -> Layer:
    times, footprint = found.times, found.footprint
    return replace(
        blank,
        forward_seconds=times.forward,
        backward_input_seconds=times.backward_input,
        backward_weight_seconds=times.backward - times.backward_input,
        split_seconds=times.split,
        recompute_seconds=times.recompute,
        activation_bytes=footprint.activation,
        held_input_bytes=footprint.held_input,
        weight_kept_bytes=footprint.weight_kept,
        workspace_bytes=found.workspace,
        output_bytes=found.handed_on.output,
        skip_bytes=found.handed_on.skips,
        spread=times.spread,
        warnings=found.flags,
    )


def _with_sample(graph: LayerGraph, bench: Bench, sample: Sample) -> LayerGraph:
    """The same model with another sample."""
    measured, _ = bench.measure(sample)
    pairs = zip(graph.layers, measured, strict=True)
    return replace(
        graph,
        layers=tuple(_with_costs(known, found) for known, found in pairs),
        microbatch_size=sample.num_rows,
        input_bytes=num_bytes(sample.inputs),
    )


def _shared(model: nn.Module, layers: Sequence[NamedLayer]) -> dict[str, nn.Parameter]:
    """Parameters that several layers hold, by their name in the model."""
    holders = Counter(id(one) for layer in layers for one in {*layer.module.parameters()})
    return {name: one for name, one in model.named_parameters() if holders[id(one)] > 1}
