"""``estimate``: a model's ``LayerGraph`` for hardware of the catalogue, from shapes alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import torch
from msgspec.structs import replace
from torch import nn

from penstock.base.arguments import public
from penstock.base.errors import InputError, ModelError
from penstock.base.values import expect, one_of
from penstock.core.catalogue import Hardware, device_named, software_named
from penstock.core.catalogue.errors import ModelKind, expected_error
from penstock.core.example import Granularity
from penstock.core.graph import Estimate, LayerGraph
from penstock.core.pricing import (
    Kernel,
    KernelPace,
    at_the_pace,
    dispatch_seconds,
    seconds_of_each,
)
from penstock.engine.device.crossing import give_memory
from penstock.engine.model import tree
from penstock.engine.model.batches import parted_if_inside, plain
from penstock.engine.model.optimizer_factory import OptimizerFactory
from penstock.engine.model.spine import NamedLayer, names_a_spine, spine_of
from penstock.engine.run.recipe import Loss, check_factory, check_loss
from penstock.engine.stage.deferral import undeferred_parameters
from penstock.engine.tensor.parts import FoundPart
from penstock.training.estimating.blocks import RepeatedBlocks, repeated_blocks, shortened
from penstock.training.estimating.counting import (
    KernelClock,
    KernelCounter,
    MetaGauge,
    count_updates,
    on_meta,
)
from penstock.training.estimating.refusals import code_that_needs_more_than_shapes
from penstock.training.estimating.substitutes import AsOnDevice, Attention
from penstock.training.profiler.alone import Sample, conditions
from penstock.training.profiler.alone.bench import (
    Measured,
    forgetting_dropouts,
    measure_footprints,
    measure_workspaces,
)
from penstock.training.profiler.alone.experts import ExpertsWatch
from penstock.training.profiler.alone.measuring import found_parts, layers_of, with_costs
from penstock.training.profiler.alone.parts import PartsWatch, with_loss_of_head
from penstock.training.profiler.alone.passes import (
    HandedOn,
    JudgedRun,
    Passes,
    RunLayer,
    handed_on,
    num_bytes,
    runs_of,
)
from penstock.training.profiler.alone.rounds import LayerTimes
from penstock.training.profiler.profiling import with_own_loss

Arithmetic = Literal["tf32", "fp8", "fp4"]
_ARITHMETIC: dict[str | None, dict[str, str]] = {
    None: {},
    "tf32": {"fp32": "tf32"},
    "fp8": {"bf16": "fp8", "fp16": "fp8", "fp32": "fp8"},
    "fp4": {"bf16": "fp4", "fp16": "fp4", "fp32": "fp4"},
}
_BLOCK = re.compile(r"^.*?\.\d+(?=\.|$)")
_MANY_BLOCKS = 12
_HOP_SECONDS = 20e-6
_UNKNOWN_SHARE = 0.01


@public(
    remedies={
        "cluster": "an estimate is of one device: give device=…, and the cluster to pk.plan",
        "dtype": "convert the model, as with model.bfloat16(), or give arithmetic=…",
        "microbatches": "one microbatch is estimated; pk.plan(graph, microbatches=…) says how many",
        "batch_size": "the rows of the inputs are those of a microbatch",
        "hardware": "give device=…",
        "gpu": "give device=…",
    }
)
def estimate(  # noqa: PLR0913 - as profile
    model: nn.Module,
    inputs: Any,
    *,
    device: str,
    loss: Loss | None = None,
    targets: Any = None,
    optimizer: OptimizerFactory | None = None,
    sizes: Sequence[int] = (),
    software: str = "eager",
    arithmetic: Arithmetic | None = None,
    attention: Attention = "fused",
    granularity: Granularity | None = None,
) -> LayerGraph:
    """Estimate every layer of ``model`` for one microbatch on a device of the catalogue.

    Nothing is computed: the model runs on meta tensors, forward, backward, and backward in halves,
    and each operation that torch dispatches becomes a kernel that is priced by its flops and bytes.
    Memory is counted as ``profile`` counts it: storages that autograd keeps, each once. Of a list
    of equal blocks three are traced, so a model of 126 blocks takes seconds. A module that looks
    into tensors cannot be estimated. Routing of experts is taken to be balanced.

    Args:
        model: as ``profile`` takes it; on the meta device it takes no memory. One with values is
            estimated as if it had none, and keeps them.
        inputs: one microbatch, rows first, on the model's device.
        device: short name (``penstock devices``), or the name of a file that ``penstock
            measure-device`` wrote.
        loss, targets: if given, the last layer's times and bytes include the loss. With a loss and
            one tensor as inputs, this stands for the targets, as the tokens of a language model do.
        optimizer: if given, ``update_seconds`` and ``optimizer_bytes`` are counted; otherwise the
            update takes 0 s and the state of Adam is assumed.
        sizes: other microbatch sizes, each at most the rows of ``inputs``; they become
            ``other_sizes``.
        software: ``"eager"``, ``"compiled"``, ``"graph"`` (captured), ``"megatron-core"``, …:
            names of ``core/catalogue/efficiencies.toml``.
        arithmetic: of matrix products, if it is not that of their dtypes: ``"tf32"`` of fp32,
            ``"fp8"``, ``"fp4"``.
        attention: ``"fused"`` as ``scaled_dot_product_attention`` chooses on the device;
            ``"causal"`` if masks over all pairs of tokens, as captured language models make them,
            are causal ones in whose place an engine says ``is_causal=True``; or ``"formula"``,
            which keeps the scores.
        granularity: of the layers of a model that must be captured: ``"module"`` or ``"block"``; by
            default blocks where there are more than twelve, of which plans take long enough.

    Returns:
        The estimate: seconds and bytes per microbatch. Its ``estimate`` says for what it is and
        which error to expect; ``warnings`` name operations that nobody knows.

    Raises:
        InputError: no such device or software, or a model and inputs on several devices.
        ModelError: the model cannot be cut, or looks at values.
    """
    pace = _pace(device, software, arithmetic)
    one_of("attention", attention, get_args(Attention))
    if granularity is not None:
        one_of("granularity", granularity, ("module", "block"))
    expect(model, nn.Module, "the model", "give an nn.Module")
    expect(sizes, Iterable, "sizes", "give a list of numbers of rows")
    check_loss(loss)
    check_factory("optimizer", optimizer)
    if loss is not None and targets is None:
        targets = inputs if isinstance(inputs, torch.Tensor) else None
        if targets is None:
            inputs, targets = parted_if_inside(inputs, loss, model)
    inputs, targets = plain(inputs, "inputs"), plain(targets, "targets")
    _check_devices(model, inputs, targets)
    request = _EstimateRequest(
        inputs, targets, loss, optimizer, tuple(sizes), pace, attention, granularity
    )

    if names_a_spine(model):
        return _estimated(model, request)
    return _estimated_in_short(model, request)


class _EstimateRequest(NamedTuple):
    """The arguments of ``estimate``, checked."""

    inputs: Any
    targets: Any
    loss: Loss | None
    optimizer: OptimizerFactory | None
    sizes: tuple[int, ...]
    pace: KernelPace
    attention: Attention
    granularity: Granularity | None


def _pace(device: str, stack: str, arithmetic: Arithmetic | None) -> KernelPace:
    hardware = device_named(device)
    if arithmetic is not None:
        one_of("arithmetic", arithmetic, ("tf32", "fp8", "fp4"))
        if arithmetic not in hardware.flops_per_second:
            raise InputError(
                f"{hardware.name} computes no {arithmetic}; it has "
                f"{', '.join(hardware.flops_per_second)}"
            )
    return KernelPace(hardware, software_named(stack), _ARITHMETIC[arithmetic])


def _check_devices(model: nn.Module, inputs: Any, targets: Any) -> None:
    state = [*model.parameters(), *model.buffers()]
    given = tree.tensors((inputs, targets))
    if any(tensor.is_meta for tensor in state) and not all(tensor.is_meta for tensor in given):
        where = next(str(tensor.device) for tensor in given if not tensor.is_meta)
        raise InputError(
            f"the model is on the meta device, but its inputs or targets are on {where}, whose "
            "values nobody would read; make them there as well: with torch.device('meta'): …"
        )


def _estimated_in_short(model: nn.Module, request: _EstimateRequest) -> LayerGraph:
    """The estimate of a model that must be traced: of three of all blocks that are alike, if that
    can be."""
    # Tracing takes seconds to import, and a chain does not need it.
    from penstock.engine.tracing.entrance import traced_on_meta

    lists = repeated_blocks(model)
    granularity = request.granularity
    if granularity is None:
        granularity = "block" if sum(count for _, count in lists) > _MANY_BLOCKS else "module"
    if lists:
        with shortened(model, lists):
            try:
                traced = traced_on_meta(model, request.inputs, granularity)
            except (ModelError, InputError):
                traced = None  # its code may count its blocks in any way; then all are traced
            graph = None if traced is None else _estimated(traced, request)
        if graph is not None:
            try:
                return _with_all_blocks(graph, lists)
            except InputError:
                pass  # blocks do not stand together
    return _estimated(traced_on_meta(model, request.inputs, granularity), request)


def _with_all_blocks(graph: LayerGraph, lists: Sequence[RepeatedBlocks]) -> LayerGraph:
    for name, count in lists:
        graph = graph.with_blocks(name, count)
    return graph


def _estimated(model: nn.Module, request: _EstimateRequest) -> LayerGraph:
    sample = Sample(request.inputs, request.targets, request.loss)
    others = sample.of_sizes(request.sizes)
    if request.loss is None and getattr(model, "gives_loss", False):
        sample = with_own_loss(model, request.inputs)
        others = sample.of_sizes(request.sizes)
    layers = spine_of(model)
    example = getattr(model, "example", None)
    with (
        _without_values(model), torch.inference_mode(False), torch.enable_grad(),
        code_that_needs_more_than_shapes(),
    ):  # fmt: skip
        parts = found_parts(model, layers)
        bench = _CountingBench(layers, [own.parts for own in parts], request)
        measured = bench.measure(_of_shapes(sample))
        graph = LayerGraph(
            layers=tuple(
                layers_of(
                    model,
                    layers,
                    parts,
                    measured,
                    count_updates(layers, request.optimizer, request.pace),
                )
            ),
            microbatch_size=sample.num_rows,
            input_bytes=num_bytes(sample.inputs),
            hop_seconds=_HOP_SECONDS,
            sum_bytes_per_second=_sum_rate(request.pace.device),
            device=request.pace.device.title,
            dtype=", ".join(sorted({str(parameter.dtype)[6:] for parameter in model.parameters()})),
            software=conditions.software(torch.device("cpu")),
            example=example,
            estimate=_with_error(request.pace, bench.kind),
        )
        graph = with_loss_of_head(graph, model, _of_shapes(sample))
        sized = [_at_size(graph, bench, _of_shapes(other)) for other in others]
    doubts = tuple(bench.doubts())
    sized = [replace(other, warnings=doubts) for other in sized]
    return replace(graph, other_sizes=tuple(sized), warnings=doubts)


def _of_shapes(sample: Sample) -> Sample:
    return Sample(on_meta(sample.inputs), on_meta(sample.targets), sample.loss)


def _at_size(graph: LayerGraph, bench: _CountingBench, sample: Sample) -> LayerGraph:
    pairs = zip(graph.layers, bench.measure(sample), strict=True)
    return replace(
        graph,
        layers=tuple(with_costs(layer, costs) for layer, costs in pairs),
        microbatch_size=sample.num_rows,
        input_bytes=num_bytes(sample.inputs),
    )


def _with_error(pace: KernelPace, kind: ModelKind) -> Estimate:
    expected = expected_error(pace.device, pace.software, kind)
    return Estimate(
        device=pace.device.name,
        software=pace.software.name,
        error=expected.share,
        basis=expected.basis,
    )


def _sum_rate(device: Hardware) -> float:
    """Bytes of gradients that are added per second: two are read, and one is written."""
    return device.memory_bytes_per_second.value * device.efficiency.memory.value / 3


@contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """A context in which parameters and buffers are on meta; they get their values back."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    gradients = [(tensor, tensor.grad) for tensor in tensors.values() if tensor.is_leaf]
    values = [(tensor, tensor.data) for tensor in tensors.values() if not tensor.is_meta]
    for tensor, _ in gradients:
        tensor.grad = None
    try:
        for tensor, held in values:
            give_memory(tensor, torch.empty_like(held, device="meta"))
        yield
    finally:
        for tensor, _ in gradients:
            tensor.grad = None
        for tensor, held in values:
            give_memory(tensor, held)
        for tensor, gradient in gradients:
            tensor.grad = gradient


class _CountingBench:
    """Counts the kernels and bytes of a model's layers with one sample after another.

    Attributes:
        kind: of the model, as its kernels tell; known after a sample.
    """

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        parts: Sequence[Sequence[FoundPart]],
        request: _EstimateRequest,
    ) -> None:
        self._layers = layers
        self._parts = parts
        self._modules = [layer.module for layer in layers]
        self._pace = request.pace
        self._attention = request.attention
        self._undeferred = undeferred_parameters(
            [module for own in self._modules for module in own.modules()]
        )
        self._blocks = _block_numbers([layer.name for layer in layers])
        self._unknown: Counter[str] = Counter()
        self._all_bytes = 0
        self.kind: ModelKind = "other"

    def measure(self, sample: Sample) -> list[Measured]:
        """Count every layer with a sample."""
        runs = runs_of(self._layers, sample.loss, sample.targets)
        given: dict[int, HandedOn] = {}
        draws: dict[int, bool] = {}
        counter = KernelCounter()
        experts = [ExpertsWatch(layer, lambda: len(counter.kernels)) for layer in self._layers]
        watched = [
            partial(self._watched, counter, given, draws, sample, experts, *pair)
            for pair in enumerate(runs)
        ]
        watches = [
            PartsWatch(module, own, lambda: len(counter.kernels))
            for module, own in zip(self._modules, self._parts, strict=True)
        ]
        with self._as_on_device(), counter:
            footprints = measure_footprints(
                self._modules, watched, sample.inputs, watches, JudgedRun.of(self._layers, sample)
            )
        until = [0.0, *accumulate(seconds_of_each(counter.kernels, self._pace))]
        gauge = MetaGauge()
        with self._as_on_device(), gauge:
            workspaces = measure_workspaces(runs, sample.inputs, gauge)
        times = self._times(runs, sample.inputs)
        return [
            Measured(
                times[index],
                footprints[index],
                given[index],
                workspaces[index],
                (),
                draws[index],
                tuple(watches[index].sizes(lambda start, stop: until[stop] - until[start])),
                experts[index].parts(lambda start, stop: until[stop] - until[start]),
            )
            for index in range(len(runs))
        ]

    def doubts(self) -> Iterator[str]:
        """A sentence on operations that nobody knows, if they are of any weight."""
        share = sum(self._unknown.values()) / max(self._all_bytes, 1)
        if self._unknown and share > _UNKNOWN_SHARE:
            names = ", ".join(name for name, _ in self._unknown.most_common(3))
            yield (
                f"nobody knows what {names} compute{'s' * (len(self._unknown) == 1)}: counted as "
                f"the bytes they read and write, {share:.0%} of all; register their flops with "
                "torch.utils.flop_counter.register_flop_formula"
            )

    def _as_on_device(self) -> AsOnDevice:
        return AsOnDevice(self._pace.device.kind, self._attention)

    def _watched(
        self,
        counter: KernelCounter,
        given: dict[int, HandedOn],
        draws: dict[int, bool],
        sample: Sample,
        experts: Sequence[ExpertsWatch],
        index: int,
        run: RunLayer,
        value: Any,
    ) -> Any:
        counter.drew = False
        with experts[index], forgetting_dropouts(self._modules[index], counter):
            output = run(value)
        draws[index] = counter.drew
        is_loss = sample.loss is not None and index == len(self._layers) - 1
        given[index] = handed_on(self._layers, index, output, is_loss)
        return output

    def _times(self, runs: Sequence[RunLayer], inputs: Any) -> list[LayerTimes]:
        kernels, laps = self._passes(runs, inputs)
        busy, host = (
            [_seconds_of(own, each) for own in laps]
            for each in (
                seconds_of_each(kernels, self._pace),
                [dispatch_seconds(kernel, self._pace) for kernel in kernels],
            )
        )
        forward, backward, split_forward, halves, backward_input = (
            at_the_pace(kernels, dispatch, self._blocks, self._pace)
            for kernels, dispatch in zip(busy, host, strict=True)
        )
        return [
            LayerTimes(
                forward=forward[index],
                backward=backward[index],
                backward_input=min(backward_input[index], backward[index]),
                split_forward=max(0.0, split_forward[index] - forward[index]),
                split=max(0.0, halves[index] - backward[index]),
                recompute=forward[index],
                spread=0.0,
            )
            for index in range(len(runs))
        ]

    def _passes(self, runs: Sequence[RunLayer], inputs: Any) -> tuple[list[Kernel], list[_Laps]]:
        """All kernels, and which are whose in each kind of pass: forwards, backwards, forwards that
        prepare for halves, both halves, the first half."""
        counter = KernelCounter()
        passes = Passes(runs, inputs, KernelClock(counter), self._undeferred)
        as_on_device = self._as_on_device()
        with as_on_device, counter:
            passes.whole()  # after it there are gradients, to which all later ones are added
            whole, split = passes.whole(), passes.split()
        self._note_unknown(counter.kernels)
        self.kind = _kind_of(counter.kernels, has_recurrences=as_on_device.saw_recurrence)
        each: tuple[Sequence[Any], ...] = (
            whole.forward, whole.backward, split.forward, split.backward_input,
            split.backward_weight,
        )  # fmt: skip
        forward, backward, split_forward, first, second = (
            [[lap] if lap else [] for lap in laps] for laps in each
        )
        halves = [[*one_half, *other] for one_half, other in zip(first, second, strict=True)]
        return counter.kernels, [forward, backward, split_forward, halves, first]

    def _note_unknown(self, kernels: Iterable[Kernel]) -> None:
        for kernel in kernels:
            self._all_bytes += kernel.num_bytes
            if kernel.kind == "unknown":
                self._unknown[kernel.name] += kernel.num_bytes


def _kind_of(kernels: Iterable[Kernel], *, has_recurrences: bool) -> ModelKind:
    """The kind of model: convolutional if half of its flops are, a transformer if it has attention,
    fused or as products beside a softmax."""
    flops: Counter[str] = Counter()
    names: set[str] = set()
    for kernel in kernels:
        flops[kernel.kind] += int(kernel.flops)
        names.add(kernel.name)
    if 2 * flops["convolution"] > flops.total():
        return "convolution"
    if has_recurrences:
        return "recurrent"
    has_scores = flops["batched-matmul"] and "_softmax" in names
    return "transformer" if flops["attention"] or has_scores else "other"


_Laps = list[list[slice]]
"""For each layer, where its kernels are among all."""


def _seconds_of(laps: _Laps, each: Sequence[float]) -> list[float]:
    return [sum(sum(each[lap]) for lap in own) for own in laps]


def _block_numbers(names: Sequence[str]) -> list[int]:
    """The number of the block that each layer is in: an entry of a list, or the layer itself."""
    numbers: dict[str, int] = {}
    for name in names:
        block = _BLOCK.match(name)
        numbers.setdefault(block[0] if block else name, len(numbers))
    blocks = [_BLOCK.match(name) for name in names]
    return [numbers[block[0] if block else name] for block, name in zip(blocks, names, strict=True)]
