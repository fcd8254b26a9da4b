"""The sizes of parts of layers that tensor ranks can share: what each keeps and passes on, and
what share of a forward it takes; and what the loss behind a head does with the logits, told by
trying it on logits in parts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from penstock.core.graph import LayerGraph
from penstock.core.layer_part import LayerPart, LossSees
from penstock.engine.device.accelerators import generators_kept
from penstock.engine.model import tree
from penstock.engine.model.spine import NamedLayer, evaluation_mode, run_spine, spine_of
from penstock.engine.stage.microbatch_graph import cut
from penstock.engine.tensor.parts import FoundPart
from penstock.engine.tensor.splits import named
from penstock.engine.tensor.vocabulary import gathers_logits
from penstock.training.profiler.alone.conditions import Clock, Sample
from penstock.training.profiler.alone.passes import RunLayer

_ROUNDS = 3


class PartSizes(NamedTuple):
    """The sizes of one part for one microbatch; see ``LayerPart``."""

    activation: int
    border: int
    output: int
    share: float


class PartsWatch:
    """Sees a layer run, as a context, and tells apart what belongs to its parts.

    Args:
        now: a stamp of the time.

    Attributes:
        kept_bytes: of all that the layer keeps.
    """

    def __init__(
        self, layer: nn.Module, parts: Sequence[FoundPart], now: Callable[[], Any]
    ) -> None:
        self._layer, self._parts, self._now = layer, parts, now
        self._open: int | None = None
        self._outside: set[int] = set()
        self._alive: list[Tensor] = []  # so that no storage address is used twice
        self.kept_bytes = 0
        self._kept = [0] * len(parts)
        self._borders = [0] * len(parts)
        self._outputs = [0] * len(parts)
        self._spans: list[list[tuple[Any, Any]]] = [[] for _ in parts]
        self._since: Any = None
        self._start: Any = None
        self._stop: Any = None
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for index, part in enumerate(self._parts):
            for path in part.opens:
                module = self._layer.get_submodule(path)
                handle = module.register_forward_pre_hook(self._opener(index), with_kwargs=True)
                self._hooks.callback(handle.remove)
            for path in part.closes or part.opens:
                module = self._layer.get_submodule(path)
                handle = module.register_forward_hook(self._closer(index))
                self._hooks.callback(handle.remove)
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = self._now()
        self._hooks.close()

    def _opener(self, index: int) -> Callable[..., None]:
        def opened(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._put_outside((args, kwargs))
            if self._open is None:
                self._open, self._since = index, self._now()
                given = [tensor.nbytes for tensor in tree.tensors((args, kwargs))]
                self._borders[index] = max(self._borders[index], *given)

        return opened

    def _closer(self, index: int) -> Callable[..., None]:
        def closed(_: nn.Module, __: Any, output: Any) -> None:
            if self._open != index:
                return
            self._spans[index].append((self._since, self._now()))
            self._outputs[index] = max(tensor.nbytes for tensor in tree.tensors(output))
            if self._parts[index].closes:  # what is kept behind a head is its own
                self._open = None
                self._put_outside(output)

        return closed

    def _put_outside(self, value: Any) -> None:
        for tensor in tree.tensors(value):
            self._outside.add(tensor.untyped_storage()._cdata)
            self._alive.append(tensor)

    def given(self, value: Any) -> None:
        """The layer gets a value, which belongs to no part."""
        self._put_outside(value)

    def keep(self, tensor: Tensor) -> None:
        """The layer keeps a tensor, and nobody has kept its storage before."""
        storage = tensor.untyped_storage()
        self.kept_bytes += storage.nbytes()
        if self._open is not None and storage._cdata not in self._outside:
            self._kept[self._open] += storage.nbytes()

    def sizes(self, seconds: Callable[[Any, Any], float]) -> list[PartSizes]:
        """What was seen.

        Args:
            seconds: those between two stamps.
        """
        whole = seconds(self._start, self._stop)
        inside = [sum(seconds(*span) for span in spans) for spans in self._spans]
        shares = [min(own / whole, 1.0) if whole > 0 else 0.0 for own in inside]
        return [*map(PartSizes, self._kept, self._borders, self._outputs, shares)]


def timed_shares(
    layers: Sequence[NamedLayer],
    parts: Sequence[Sequence[FoundPart]],
    runs: Sequence[RunLayer],
    inputs: Any,
    clock: Clock,
) -> list[list[float]]:
    """The share of each part in its layer's forward, as timed in a few rounds."""
    rounds: list[list[list[PartSizes]]] = []
    for _ in range(_ROUNDS if any(parts) else 0):
        watches = [
            PartsWatch(layer.module, own, clock.now)
            for layer, own in zip(layers, parts, strict=True)
        ]
        value = tree.replace(Tensor, Tensor.clone, inputs)
        for index, (run, watch) in enumerate(zip(runs, watches, strict=True)):
            _, value = cut(value, index > 0)
            with watch:
                value = run(value)
        clock.settle()
        rounds.append([watch.sizes(clock.seconds) for watch in watches])
    return [
        [
            statistics.median(sizes[layer][part].share for sizes in rounds)
            for part in range(len(own))
        ]
        for layer, own in enumerate(parts)
    ]


def parts_of(layer: NamedLayer, parts: Sequence[FoundPart]) -> tuple[LayerPart, ...]:
    """The parts of a layer as a profile has them, before they are measured."""
    return tuple(
        LayerPart(
            kind=part.kind,
            splits={
                (named(layer, path) if path else layer.name): split
                for path, split in part.splits.items()
            },
            pieces=part.pieces,
            key_value_heads=part.key_value_heads,
            num_sums=part.num_sums,
            gated=part.gated,
            is_even=part.is_even,
            loss=part.loss,
            parameter_bytes=sum(weight.nbytes for weight in part.parameters(layer.module)),
        )
        for part in parts
    )


def measured(part: LayerPart, sizes: PartSizes) -> LayerPart:
    """A part with the sizes that it has for a microbatch."""
    return replace(
        part,
        activation_bytes=sizes.activation,
        border_bytes=sizes.border,
        output_bytes=sizes.output,
        forward_share=sizes.share,
    )


_ROWS = 2


def with_loss_of_head(graph: LayerGraph, model: nn.Module, sample: Sample) -> LayerGraph:
    """A profile whose head says whether the sample's loss can be computed on shards of the logits.

    Args:
        graph: as it is where nothing is to be said: without a head, or a loss, or with one that the
            model computes itself.
        model: run in evaluation mode on two rows of the sample.
    """
    asked = any(part.kind == "head" and not part.loss for part in graph.layers[-1].parts)
    if not asked or sample.loss is None or getattr(model, "gives_loss", False):
        return graph
    few = sample.of(min(_ROWS, sample.num_rows))
    assert few.loss is not None
    try:
        with (
            evaluation_mode(model),
            torch.no_grad(),
            generators_kept(tensor.device for tensor in tree.tensors(few.inputs)),
        ):
            layers = [layer.module for layer in spine_of(model)]
            outputs = run_spine(layers, tree.replace(Tensor, Tensor.clone, few.inputs))
            gathers = gathers_logits(few.loss, outputs, few.targets)
    except Exception:  # a model may refuse so few rows in any way, and nobody has asked for them
        return graph
    loss: LossSees = "whole" if gathers else "shards"
    others = tuple(_with_loss(other, loss) for other in graph.other_sizes)
    return replace(_with_loss(graph, loss), other_sizes=others)


def _with_loss(graph: LayerGraph, loss: LossSees) -> LayerGraph:
    *rest, last = graph.layers
    parts = tuple(replace(part, loss=loss) if part.kind == "head" else part for part in last.parts)
    return replace(graph, layers=(*rest, replace(last, parts=parts)))
