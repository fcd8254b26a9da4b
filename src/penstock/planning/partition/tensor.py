"""``split_layers``: share every layer of a model among the devices of a tensor-parallel group.

Dividing the rows of a layer (data parallelism) costs a sum of its gradients once per minibatch;
dividing its parameters costs collectives on its activations once per microbatch. Which is less
depends on the layer (Krizhevsky, "One weird trick for parallelizing convolutional neural networks",
arXiv 1404.5997), and on its neighbours: a layer that divides its inputs can read what a layer that
divides its outputs gives, for nothing (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3).
So all layers are decided together (``tensor_layouts``); here the answer becomes the model as one
device of the group sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.base.values import is_whole
from penstock.core.cluster import Link
from penstock.core.graph import Layer, LayerGraph
from penstock.core.layer_part import LayerPart
from penstock.planning.partition.tensor_layouts import (
    DeviceRing,
    LayerSplit,
    LayoutProblem,
    Sharing,
    Solution,
    Step,
    TensorLayout,
    ways,
)

__all__ = ["LayerSplit", "TensorLayout", "TensorSplit", "split_layers"]


@dataclass(frozen=True, kw_only=True)
class TensorSplit:
    """How a group shares a model.

    Attributes:
        splits: how each layer is split, by its name, as the plan says it; empty for one rank.
            ``"data"``: each device has its part of the rows; ``"column"``: of the outputs;
            ``"row"``: of the inputs; ``"parts"``: modules in it are divided (see ``said``), and
            with ``"sequence"`` what is around them by positions; ``"context"``: everything is, and
            keys and values go round (``context``); ``"any"``: it works in the layout
            of its values (see ``layouts``), on all of them where that is ``"whole"``.
        layouts: how each layer's output lies, by the layer's name: ``"rows"``, ``"whole"`` or
            ``"features"``; empty for one rank.
        graph: the same layers as the group sees them. Times are those of the busiest device, with
            communication in ``forward_seconds``, ``backward_input_seconds`` and, for the sum of
            gradients, ``update_seconds``; bytes are those of one device. Microbatches have as many
            rows as before; profiles of other sizes are left out.
        collectives: of the times of each layer in ``graph``, by its name and theirs, what is
            communication.
        speed: of the devices for which it was chosen. As in any profile, times in ``graph`` are
            divided by it to get theirs; so are ``collectives``.
        seconds: predicted for a minibatch, one microbatch after another, updates included.
        moved_bytes: sent by all devices together, per minibatch.
        data_seconds, data_moved_bytes: the same if all layers divided their rows.
        tensor_seconds, tensor_moved_bytes: the same if every layer divided its parameters, as well
            as it can, and none its rows.
        exact: whether no other choice is faster by these costs. Not promised where too many values
            that are read again much later are alive at once.
        parts: how modules inside layers are split, by the layers' names.
    """

    splits: dict[str, LayerSplit]
    layouts: dict[str, TensorLayout]
    graph: LayerGraph
    seconds: float
    moved_bytes: int
    data_seconds: float
    data_moved_bytes: int
    tensor_seconds: float
    tensor_moved_bytes: int
    collectives: dict[str, dict[str, float]]
    speed: float = 1.0
    exact: bool = True
    parts: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def besides(self) -> str:
        """What is divided besides layers, in words that go on a sentence; empty if nothing is."""
        modules = {how for inside in self.parts.values() for how in inside.values()}
        divided = [
            *["the positions between them"] * ("sequence" in self.splits.values()),
            *["the classes under the loss"] * ("vocabulary" in modules),
        ]
        return f" with {' and '.join(divided)}" if divided else ""

    def said(self, layer: str) -> dict[str, str]:
        """How a layer and the modules in it are split, as a plan says it."""
        split, inside = self.splits[layer], self.parts.get(layer, {})
        if split == "parts":
            return inside
        own = "whole" if split == "any" and self.layouts[layer] == "whole" else split
        return {layer: own, **inside}


def split_layers(
    graph: LayerGraph,
    num_tensor_ranks: int,
    link: Link,
    *,
    num_microbatches: int,
    speed: float = 1.0,
    elsewhere: bool = False,
    seconds_per_byte: float = 0.0,
) -> TensorSplit:
    """Choose how ``num_tensor_ranks`` devices share each layer, so that a minibatch takes least.

    A choice's seconds are ``num_microbatches`` times forward and backward of every layer, with the
    collectives that its neighbours' layouts make necessary, plus updates and the ring all-reduces
    of the gradients of layers that divide their rows. Nothing overlaps. The model's input is there
    in any layout; its output is brought to where the loss can be computed (``rows`` or ``whole``).

    Args:
        graph: the profile. Its ``microbatch_size`` is what can be divided into rows; where nobody
            knows it (files of PipeDream's), 1 row cannot, and the real number has to be put there.
        num_tensor_ranks: devices of the group, equally fast, at least 1.
        link: between any two of them.
        num_microbatches: per minibatch, at least 1.
        speed: of the devices, as ``Device`` has it; links are as fast beside any.
        elsewhere: whether another engine is to run it (see ``ways``).
        seconds_per_byte: that a minibatch may take longer for a byte less on each device.

    Returns:
        The best choice. For one rank, the graph as it is.

    Raises:
        InputError: a count is not a whole number or below 1.
    """
    counts = {"num_tensor_ranks": num_tensor_ranks, "num_microbatches": num_microbatches}
    for name, count in counts.items():
        if not is_whole(count) or count < 1:
            raise InputError(f"{name} is {count!r}, but must be a whole number ≥ 1")
    problem = LayoutProblem(
        graph,
        DeviceRing(num_tensor_ranks, beside(link, speed), graph.microbatch_size),
        num_microbatches,
    )
    data = problem.solve(_by_rows)
    tensor = problem.solve(partial(_by_parameters, num_ranks=num_tensor_ranks))
    allowed = partial(ways, num_ranks=num_tensor_ranks, elsewhere=elsewhere)
    best = searched = _with_ties_alike(problem, allowed, seconds_per_byte)
    if not searched.exact and not seconds_per_byte:
        # A search that had to leave something out may have left these out.
        best = min(searched, data, tensor, key=lambda solution: solution.seconds)
    alone = num_tensor_ranks == 1
    return TensorSplit(
        splits={} if alone else {name: sharing.split for name, sharing in _named(problem, best)},
        layouts={} if alone else {name: sharing.gives for name, sharing in _named(problem, best)},
        parts={}
        if alone
        else {
            name: _said_of_parts(sharing)
            for name, sharing in _named(problem, best)
            if sharing.parts
        },
        graph=graph if alone else _as_seen(problem, best),
        seconds=best.seconds / speed,
        moved_bytes=problem.moved_bytes(best.sharings),
        data_seconds=data.seconds / speed,
        data_moved_bytes=problem.moved_bytes(data.sharings),
        tensor_seconds=tensor.seconds / speed,
        tensor_moved_bytes=problem.moved_bytes(tensor.sharings),
        collectives={} if alone else _collectives(problem, best),
        speed=speed,
        exact=searched.exact,
    )


def beside(link: Link, speed: float) -> Link:
    """A link in the time of the machine that was profiled: what devices of another speed do
    meanwhile counts as if it took as long as there."""
    return Link(
        latency_seconds=link.latency_seconds * speed, bytes_per_second=link.bytes_per_second / speed
    )


def _collectives(problem: LayoutProblem, solution: Solution) -> dict[str, dict[str, float]]:
    return {
        layer.name: {
            "forward_seconds": step.forward.seconds,
            "backward_input_seconds": step.backward.seconds,
            "recompute_seconds": step.forward.seconds,
            "update_seconds": problem.reduction(layer, sharing).seconds,
        }
        for layer, sharing, step in problem.walk(solution.sharings)
    }


def _with_ties_alike(
    problem: LayoutProblem, allowed: Callable[[Layer], Sequence[Sharing]], seconds_per_byte: float
) -> Solution:
    """The best choice in which all holders of a tied parameter are shared alike: all of them by
    rows, or all with the whole parameter, or all with a part of it."""
    tied = [layer for layer in problem.graph.layers if layer.shared_parameters]
    if not tied:
        return problem.solve(allowed, seconds_per_byte)

    def solved(alike: Callable[[Sharing], bool]) -> Iterator[Solution]:
        def chosen(layer: Layer) -> Sequence[Sharing]:
            every = allowed(layer)
            return [*filter(alike, every)] if layer.shared_parameters else every

        if all(chosen(layer) for layer in tied):
            yield problem.solve(chosen, seconds_per_byte)

    def cost(solution: Solution) -> float:
        pairs = zip(problem.graph.layers, solution.sharings, strict=True)
        held = sum(problem.device_bytes(*pair) for pair in pairs)
        return solution.seconds + seconds_per_byte * held

    kinds: tuple[Callable[[Sharing], bool], ...] = (_is_by_rows, _repeats_table, _divides_table)
    return min((solution for kind in kinds for solution in solved(kind)), key=cost)


def _is_by_rows(sharing: Sharing) -> bool:
    return sharing.divides == "rows"


def _divides_table(sharing: Sharing) -> bool:
    """Whether an embedding, or a head, has a part of the vocabulary on each device."""
    return any(part.kind in ("embedding", "head") for part in sharing.parts)


def _repeats_table(sharing: Sharing) -> bool:
    return not (_is_by_rows(sharing) or _divides_table(sharing))


def _said_of_parts(sharing: Sharing) -> dict[str, str]:
    return {
        module: "vocabulary" if part.kind == "head" and _may_share(part, sharing) else split
        for part in sharing.parts
        for module, split in part.splits.items()
    }


def _may_share(head: LayerPart, sharing: Sharing) -> bool:
    """Whether a loss is to be computed on shards of the logits. Where nobody knows the loss it is
    asked for, too: what a loss cannot do on them costs a gather when it runs."""
    return sharing.shares_loss or head.loss == ""


def _named(problem: LayoutProblem, solution: Solution) -> list[tuple[str, Sharing]]:
    names = (layer.name for layer in problem.graph.layers)
    return list(zip(names, solution.sharings, strict=True))


_DIVIDING = ("column", "row", "parts", "sequence")


def _by_rows(layer: Layer) -> list[Sharing]:
    there = [sharing for sharing in ways(layer) if sharing.divides == "rows"]
    return there or [sharing for sharing in ways(layer) if sharing.divides == "whole"]


def _by_parameters(layer: Layer, num_ranks: int) -> list[Sharing]:
    there = [sharing for sharing in ways(layer, num_ranks) if sharing.divides != "rows"]
    divided = [sharing for sharing in there if sharing.split in _DIVIDING]
    return divided or there


def _as_seen(problem: LayoutProblem, solution: Solution) -> LayerGraph:
    """The graph as one device of the group sees it, its communication included."""
    share = problem.ring.share(solution.sharings[0].reads)
    return replace(
        problem.graph,
        layers=tuple(_layer_as_seen(problem, *step) for step in problem.walk(solution.sharings)),
        input_bytes=_part(problem.graph.input_bytes, share),
        other_sizes=(),
    )


def _layer_as_seen(problem: LayoutProblem, layer: Layer, sharing: Sharing, step: Step) -> Layer:
    ring = problem.ring
    work, parameters = ring.work_share(sharing), ring.parameter_share(layer, sharing)
    reads, gives = ring.share(sharing.reads), ring.share(sharing.gives)
    kept = ring.kept_share(layer, sharing)
    most = kept if sharing.parts else max(reads, gives)
    # The gradient of parameters needs the input, and nobody else has what a collective brought.
    copied = step.copied_bytes if layer.parameter_bytes else 0.0
    summed = problem.reduction(layer, sharing).seconds
    again, gradients = layer.recompute_seconds, layer.gradient_bytes
    table = ring.share("features") if _divides_table(sharing) else 1.0
    return replace(
        layer,
        forward_seconds=layer.forward_seconds * work + step.forward.seconds,
        backward_input_seconds=layer.backward_input_seconds * work + step.backward.seconds,
        backward_weight_seconds=layer.backward_weight_seconds * work,
        split_forward_seconds=layer.split_forward_seconds * work,
        split_seconds=layer.split_seconds * work,
        recompute_seconds=None if again is None else again * work + step.forward.seconds,
        collective_seconds=step.forward.seconds + step.backward.seconds,
        update_seconds=layer.update_seconds * parameters + summed,
        activation_bytes=max(_part(layer.activation_bytes, kept), ceil(copied)),
        loss_bytes=_part(layer.loss_bytes, kept),
        held_input_bytes=_part(layer.held_input_bytes, reads),
        weight_kept_bytes=_part(layer.weight_kept_bytes, most),
        workspace_bytes=_part(layer.workspace_bytes, most),
        output_bytes=_part(layer.output_bytes, gives),
        parameter_bytes=_part(layer.parameter_bytes, parameters),
        gradient_bytes=None if gradients is None else _part(gradients, parameters),
        buffer_bytes=_part(layer.buffer_bytes, parameters),
        optimizer_bytes=_part(layer.optimizer_bytes, parameters),
        skip_bytes={name: _part(size, gives) for name, size in layer.skip_bytes.items()},
        shared_parameters={
            name: _part(size, table) for name, size in layer.shared_parameters.items()
        },
    )


def _part(num_bytes: int, share: float) -> int:
    return ceil(num_bytes * share)
