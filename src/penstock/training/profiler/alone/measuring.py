"""``measure_alone``: measures a model's layers on a sample and gives their ``LayerGraph``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace
from torch import nn

from penstock.base.units import format_seconds
from penstock.core.graph import Layer, LayerGraph
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.model.optimizer_factory import OptimizerFactory
from penstock.engine.model.spine import NamedLayer, spine_of
from penstock.engine.tensor.followed import FoundParts, followed
from penstock.engine.tensor.parts import parts_in, with_ties_alike
from penstock.engine.tensor.splits import trait_of
from penstock.engine.tracing.layers import CapturedLayer, units_of
from penstock.training.profiler.alone.bench import Bench, Measured, Progress
from penstock.training.profiler.alone.conditions import (
    Sample,
    device_of,
    name_of,
    software,
    undisturbed,
)
from penstock.training.profiler.alone.overheads import (
    Update,
    measure_hand_over,
    measure_moving,
    measure_new_pages,
    measure_op,
    measure_sum,
    measure_updates,
)
from penstock.training.profiler.alone.parts import measured as measured_part
from penstock.training.profiler.alone.parts import parts_of
from penstock.training.profiler.alone.passes import num_bytes


class MeasuredAlone(NamedTuple):
    """The layers while nothing else works.

    Attributes:
        graph: their profile, without contention.
        interrupted: whether somebody has ended it before it was complete; its warnings say so.
    """

    graph: LayerGraph
    interrupted: bool


def measure_alone(
    model: nn.Module,
    sample: Sample,
    others: Sequence[Sample],
    *,
    optimizer: OptimizerFactory | None,
    repeats: int,
    num_threads: int,
    progress: Progress | None,
) -> MeasuredAlone:
    """Measure every layer while nothing else works; see ``penstock.profile``.

    Args:
        sample: one microbatch.
        others: microbatches of other sizes; they become ``other_sizes``.
        optimizer, repeats, num_threads: as ``penstock.profile`` takes them.
        progress: called with (done, total) rounds.

    Raises:
        ModelError: the model cannot be cut, or a layer fails on its input.
        InputError: a model and inputs on several devices.
    """
    layers = spine_of(model)
    device = device_of(model, sample.inputs)
    with undisturbed(model, num_threads, device):
        parts = found_parts(model, layers)
        bench = Bench(
            layers, [own.parts for own in parts], device, repeats, 1 + len(others), progress
        )
        # What has no rounds comes first: then rounds may be interrupted, and all is there.
        updates = measure_updates(layers, optimizer, bench.clock)
        hop_seconds = measure_hand_over()
        op_seconds = measure_op(bench.clock, device)
        sum_bytes_per_second = measure_sum(bench.clock, device)
        on_host = is_on_host(device)
        moved_bytes_per_second = measure_moving() if on_host else 0.0
        new_bytes_per_second = measure_new_pages() if on_host else 0.0
        measured = bench.measure(sample)
        graph = LayerGraph(
            layers=tuple(layers_of(model, layers, parts, measured, updates)),
            microbatch_size=sample.num_rows,
            input_bytes=num_bytes(sample.inputs),
            hop_seconds=hop_seconds,
            op_seconds=op_seconds,
            sum_bytes_per_second=sum_bytes_per_second,
            moved_bytes_per_second=moved_bytes_per_second,
            new_bytes_per_second=new_bytes_per_second,
            num_threads=num_threads,
            device=name_of(device),
            dtype=", ".join(sorted({str(parameter.dtype)[6:] for parameter in model.parameters()})),
            software=software(device),
        )
        sized = _with_samples(graph, bench, others)
    warnings = tuple(_shortness(graph, bench, repeats, others[len(sized) :]))
    sized = tuple(replace(other, warnings=warnings) for other in sized)
    return MeasuredAlone(replace(graph, other_sizes=sized, warnings=warnings), bench.interrupted)


def _with_samples(
    graph: LayerGraph, bench: Bench, samples: Sequence[Sample]
) -> tuple[LayerGraph, ...]:
    """The profiles with other samples, as many as there are before somebody interrupts them."""
    measured: list[LayerGraph] = []
    try:
        for sample in samples:
            if bench.interrupted:
                break
            measured.append(_with_sample(graph, bench, sample))
    except KeyboardInterrupt:
        bench.interrupted = True
    return tuple(measured)


def _shortness(
    graph: LayerGraph, bench: Bench, repeats: int, left_out: Sequence[Sample]
) -> Iterator[str]:
    """Sentences on measurements that are fewer than asked for, and why."""
    times = f"layers were timed {bench.num_rounds} times instead of {repeats}"
    if bench.interrupted:
        sizes = ", ".join(str(sample.num_rows) for sample in left_out)
        missing = [times] * (bench.num_rounds < repeats)
        missing += [f"not measured with {sizes} rows"] * bool(left_out)
        yield ": ".join(filter(None, ["interrupted", ", ".join(missing)]))
    elif bench.num_rounds < repeats:
        seconds = sum(layer.compute_seconds for layer in graph.layers)
        yield (
            f"a microbatch takes {format_seconds(seconds)}, so {times}; more repeats give them "
            "more time"
        )


def found_parts(model: nn.Module, layers: Sequence[NamedLayer]) -> list[FoundParts]:
    """The parts of each layer that tensor ranks can share, and whether they can share positions.

    Raises:
        ModelError: what a module says of its parts is not true.
    """
    parts = [parts_in(layer, model, is_last=layer is layers[-1]) for layer in layers]
    tied = {id(weight) for weight in _shared(model, layers).values()}
    parts = with_ties_alike(layers, parts, tied)
    return followed(layers, parts, gives_loss=getattr(model, "gives_loss", False))


def layers_of(
    model: nn.Module,
    layers: Sequence[NamedLayer],
    parts: Sequence[FoundParts],
    measured: Sequence[Measured],
    updates: Sequence[Update],
) -> Iterator[Layer]:
    """The layers of a profile: what each is, and what was measured, or counted, of it."""
    shared = _shared(model, layers)
    before = ""
    units = _units(layers)
    rows = _have_rows(model, layers, measured)
    columns = zip(layers, parts, measured, updates, rows, strict=True)
    for layer, (own_parts, by_positions), costs, update, by_rows in columns:
        module = layer.module
        reads: tuple[str, ...] | None = getattr(module, "reads", None)
        own = {id(parameter) for parameter in module.parameters()}
        blank = Layer(
            name=layer.name,
            kind=_kind(module, costs.draws),
            forward_seconds=0.0,
            backward_input_seconds=0.0,
            backward_weight_seconds=0.0,
            update_seconds=update.seconds,
            parameter_bytes=(weights := num_bytes(list(module.parameters()))),
            gradient_bytes=None if update.gradient_bytes == weights else update.gradient_bytes,
            buffer_bytes=num_bytes(list(module.buffers())),
            optimizer_bytes=update.state_bytes,
            inputs=None if reads is None else tuple(name for name in reads if name == before),
            after=tuple(name for name in reads or () if name != before),
            unit=units[layer.name],
            shared_parameters={
                name: tensor.nbytes for name, tensor in shared.items() if id(tensor) in own
            },
            signature=layer.signature,
            by_rows=by_rows,
            by_positions=by_positions,
            parts=parts_of(layer, own_parts),
        )
        before = layer.name
        yield with_costs(blank, costs)


def _have_rows(
    model: nn.Module, layers: Sequence[NamedLayer], measured: Sequence[Measured]
) -> list[bool]:
    """Whether all that each layer takes and gives has rows, where it was recorded: other layers are
    written for that. Who holds a parameter of one that has none has none either."""
    given = [costs.footprint.by_rows for costs in measured]
    given.append(not getattr(model, "gives_loss", False))
    rows = [
        not isinstance(layer.module, CapturedLayer) or (takes and gives)
        for layer, (takes, gives) in zip(layers, pairwise(given), strict=True)
    ]
    bound = {
        id(weight)
        for layer, own in zip(layers, rows, strict=True)
        for weight in layer.module.parameters()
        if not own
    }
    return [
        own and not any(id(weight) in bound for weight in layer.module.parameters())
        for layer, own in zip(layers, rows, strict=True)
    ]


def _units(layers: Sequence[NamedLayer]) -> dict[str, str]:
    """For each layer, the first of those with which it is recomputed; "" if it is alone."""
    units: dict[str, str] = {}
    for start, stop in units_of([layer.module for layer in layers]):
        name = layers[start].name if stop - start > 1 else ""
        units |= {layer.name: name for layer in layers[start:stop]}
    return units


def with_costs(blank: Layer, costs: Measured) -> Layer:
    """A layer with other costs of a microbatch."""
    times, footprint = costs.times, costs.footprint
    return replace(
        blank,
        forward_seconds=times.forward,
        backward_input_seconds=times.backward_input,
        backward_weight_seconds=times.backward - times.backward_input,
        split_forward_seconds=times.split_forward,
        split_seconds=times.split,
        recompute_seconds=times.recompute,
        activation_bytes=footprint.activation,
        loss_bytes=footprint.loss,
        mask_bytes=footprint.masks,
        held_input_bytes=footprint.held_input,
        input_shape=footprint.input_shape,
        weight_kept_bytes=footprint.weight_kept,
        workspace_bytes=costs.workspace,
        output_bytes=costs.handed_on.output,
        parts=tuple(map(measured_part, blank.parts, costs.parts)),
        experts=costs.experts,
        skip_bytes=costs.handed_on.skips,
        spread=times.spread,
        warnings=costs.flags,
    )


def _with_sample(graph: LayerGraph, bench: Bench, sample: Sample) -> LayerGraph:
    """The profile of the same model with another sample."""
    measured = bench.measure(sample)
    pairs = zip(graph.layers, measured, strict=True)
    return replace(
        graph,
        layers=tuple(with_costs(layer, costs) for layer, costs in pairs),
        microbatch_size=sample.num_rows,
        input_bytes=num_bytes(sample.inputs),
    )


def _shared(model: nn.Module, layers: Sequence[NamedLayer]) -> dict[str, nn.Parameter]:
    """Parameters that several layers hold, by their name in the model."""
    holders = Counter(id(weight) for layer in layers for weight in {*layer.module.parameters()})
    named = model.named_parameters()
    return {name: weight for name, weight in named if holders[id(weight)] > 1}


def _kind(module: nn.Module, draws: bool) -> str:
    """The class of a layer, as the planner must know it: a class of the user's is none of torch's
    by the same name, and a captured layer cannot be divided as its module could. In brackets stands
    what else decides how a layer can be divided."""
    name = getattr(module, "kind", type(module).__name__)
    trait = trait_of(module)
    if isinstance(module, CapturedLayer):
        name = f"captured {name}"
    elif not type(module).__module__.startswith("torch.") and hasattr(nn, name):
        name, trait = f"own {name}", ""
    traits = ", ".join(filter(None, [trait, "draws" if draws else ""]))
    return f"{name}({traits})" if traits else name
