"""The ways in which a group of tensor ranks can share layers, and the fastest way for all of a
model.

Between two layers a value lies in a layout, as in torch's DTensor: each device has its part of the
batch (``rows``), all of it (``whole``) or its part of the features (``features``). A way to share a
layer says which layout it reads and which it gives. Where the two ends of a value disagree, a
collective goes over the group's ring; so does the gradient, on its way back. A gradient can also be
``partial``: every device has a term of the sum.

The fastest way is found by a dynamic programme. The state behind a layer is the layout of every
value that is still to be read. In a chain that is one value; a residual block has two at once. As
long as few values are alive together, all choices are looked at, however the layers branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from penstock.core.cluster import Link
from penstock.core.graph import Layer, LayerGraph
from penstock.core.layer_part import LayerPart
from penstock.planning.partition.layers import sources_of

LayerSplit = Literal["data", "column", "row", "any", "parts", "sequence", "context"]
TensorLayout = Literal["rows", "whole", "features", "sequence"]
GradientLayout = Literal["rows", "whole", "features", "sequence", "partial"]


@dataclass(frozen=True)
class Sharing:
    """One way for a group to share a layer.

    Attributes:
        split: what the plan calls it.
        divides: what each device has a part of: the rows, nothing (``whole``: all do the same), or
            the features and with them the parameters.
        reads: layout of the layer's inputs.
        gives: layout of its output.
        returns: how the gradients of its inputs come out.
        parts: what is divided inside the layer, if it is divided so; ``divides`` is then what each
            device has of all that is around them.
        regathers: whether what enters a part is kept as it lies, and brought together again for the
            gradients of weights, as other engines do; else the whole is kept.
        shares_loss: whether the loss behind a head is computed on parts of the vocabulary.
    """

    split: LayerSplit
    divides: TensorLayout
    reads: TensorLayout
    gives: TensorLayout
    returns: GradientLayout
    parts: tuple[LayerPart, ...] = ()
    regathers: bool = False
    shares_loss: bool = False


# Of equally fast ways the search takes the first, so those that need less memory come first.
_DATA = Sharing("data", "rows", "rows", "rows", "rows")
_REPEATED = Sharing("any", "whole", "whole", "whole", "whole")
_POINTWISE: tuple[Sharing, ...] = (
    Sharing("any", "rows", "rows", "rows", "rows"),
    _REPEATED,
    Sharing("any", "features", "features", "features", "features"),
)
_CHANNELWISE = (_DATA, _REPEATED, _POINTWISE[2])
_COLUMN = Sharing("column", "features", "whole", "features", "partial")
_ROW: tuple[Sharing, ...] = (
    Sharing("row", "features", "features", "rows", "features"),
    Sharing("row", "features", "features", "whole", "features"),
    Sharing("row", "features", "features", "features", "features"),
)
# Each device looks up the tokens of its part of the vocabulary, and everyone adds up.
_LOOK_UP: tuple[Sharing, ...] = (
    Sharing("row", "features", "whole", "rows", "whole"),
    Sharing("row", "features", "whole", "whole", "whole"),
    Sharing("row", "features", "whole", "features", "whole"),
)

_LINEAR_KINDS = {"linear", "conv1d", "conv2d", "conv3d"}
_CHANNEL_KINDS = {
    *("batchnorm1d", "batchnorm2d", "batchnorm3d"),
    *("instancenorm1d", "instancenorm2d", "instancenorm3d", "prelu"),
}
_POINTWISE_KINDS = {
    *("relu", "relu6", "leakyrelu", "elu", "gelu", "silu", "mish", "tanh", "sigmoid", "hardswish"),
    *("dropout", "dropout1d", "dropout2d", "identity", "add", "mul", "sub", "flatten", "view"),
    *("maxpool1d", "maxpool2d", "maxpool3d", "avgpool1d", "avgpool2d", "avgpool3d"),
    *("adaptiveavgpool1d", "adaptiveavgpool2d", "adaptivemaxpool2d", "size", "upsample"),
}


def ways(layer: Layer, num_ranks: int = 2, *, elsewhere: bool = False) -> tuple[Sharing, ...]:
    """How a group of ``num_ranks`` can share ``layer``, told by its parts or by its kind.

    Linear layers, convolutions and embeddings can divide their parameters. Layers that treat every
    feature alone (activations, dropout, pooling, sums) work in any layout, and so does attention
    without parameters, head by head. Batch normalisation takes its parameters along with its
    channels. Blocks divide those of their parts that so many devices can share, and around them the
    positions of a sequence if all of them can be. Everything else has its rows divided or is
    repeated on all devices. So have grouped convolutions and what cannot be divided, where a kind
    says so; layers with tied parameters that are no parts, whose other holders would have to divide
    them alike; and layers with skips, because nobody knows what is in them.
    """
    details = layer.kind.partition("(")[2]
    # What draws for its rows only would draw other numbers than one device does.
    plain = (_REPEATED,) if "draws" in details or not layer.by_rows else (_DATA, _REPEATED)
    parts = tuple(part for part in layer.parts if not part.refusal(num_ranks))
    if parts or (layer.by_positions and not layer.parts):
        divided = [*_by_parts(layer, parts, elsewhere=elsewhere)]
        return (*reversed(divided), *plain)
    unknown = layer.skip_bytes or "groups=" in details or "undivided" in details
    if layer.shared_parameters or unknown:
        return plain
    return _by_kind(layer) or plain


def _by_kind(layer: Layer) -> tuple[Sharing, ...]:
    """How a layer that is a module of torch's can be shared; empty for what is not known."""
    kind = _kind_of(layer)
    if kind in _LINEAR_KINDS:
        return (_DATA, _COLUMN, *_ROW, _REPEATED)
    if kind == "embedding":
        return (_DATA, _COLUMN, *_LOOK_UP, _REPEATED)
    if not layer.parameter_bytes and (kind in _POINTWISE_KINDS or "attention" in kind):
        return _POINTWISE
    return _CHANNELWISE if kind in _CHANNEL_KINDS else ()


def _by_parts(layer: Layer, parts: tuple[LayerPart, ...], *, elsewhere: bool) -> Iterator[Sharing]:
    heads = [part for part in parts if part.kind == "head"]
    on_shards = bool(heads) and all(head.loss == "shards" for head in heads)
    if parts:
        yield Sharing(
            "parts", "whole", "whole", "whole", "whole", parts,
            shares_loss=on_shards and not elsewhere,
        )  # fmt: skip
    if heads and elsewhere:
        yield Sharing("parts", "whole", "whole", "whole", "whole", parts, shares_loss=True)
        yield Sharing("parts", "whole", "sequence", "whole", "sequence", parts, shares_loss=True)
    # Nobody knows of another engine whether what a layer has for later ones besides, as masks, are
    # values of positions; an attention that cannot be shared needs all of them.
    elif len(parts) == len(layer.parts) and (
        layer.by_positions or (elsewhere and not layer.skip_bytes)
    ):
        looks_up = any(part.kind == "embedding" for part in parts)
        reads: TensorLayout = "whole" if looks_up else "sequence"
        gives: TensorLayout = "whole" if heads else "sequence"
        yield Sharing(
            "sequence", "sequence", reads, gives, "sequence", parts,
            regathers=elsewhere, shares_loss=on_shards,
        )  # fmt: skip


def _kind_of(layer: Layer) -> str:
    """The bare kind: ``linear`` for ``Linear(in_features=8, out_features=8)``."""
    return layer.kind.split("(")[0].strip().lower().replace("_", "")


@dataclass(frozen=True)
class Traffic:
    """The cost of communication: seconds, and bytes that each device sends."""

    seconds: float = 0.0
    num_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.seconds + other.seconds, self.num_bytes + other.num_bytes)


NOTHING = Traffic()


@dataclass(frozen=True)
class DeviceRing:
    """A group of devices that share layers.

    Attributes:
        num_ranks: how many devices there are, at least 1.
        link: what joins any two of them.
        num_rows: rows of a microbatch; a device has ``ceil(num_rows / num_ranks)`` of them at most.
    """

    num_ranks: int
    link: Link
    num_rows: int

    def share(self, layout: TensorLayout) -> float:
        """The part of a value, or of the work on it, that the busiest device has."""
        if layout == "whole":
            return 1.0
        if layout in ("features", "sequence"):
            return 1 / self.num_ranks
        return ceil(self.num_rows / self.num_ranks) / self.num_rows

    def work_share(self, sharing: Sharing) -> float:
        """The part of a layer's work that the busiest device has."""
        if sharing.shares_loss:
            return self.share("features")
        around = 1.0 - sum(part.forward_share for part in sharing.parts)
        # Around a head there is the loss, which all devices compute unless they share it.
        has_loss = any(part.kind == "head" for part in sharing.parts)
        share = 1.0 if has_loss else self.share(sharing.divides)
        inside = (part.forward_share * part.share(self.num_ranks) for part in sharing.parts)
        return max(around, 0.0) * share + sum(inside)

    def parameter_share(self, layer: Layer, sharing: Sharing) -> float:
        """The part of a layer's parameters that a device has."""
        if not sharing.parts or not layer.parameter_bytes:
            return self.share("features") if sharing.divides == "features" else 1.0
        saved = (part.parameter_bytes * (1 - part.share(self.num_ranks)) for part in sharing.parts)
        return 1.0 - sum(saved) / layer.parameter_bytes

    def kept_share(self, layer: Layer, sharing: Sharing) -> float:
        """The part of what a layer keeps for its backward that a device has."""
        if not sharing.parts or not layer.activation_bytes:
            return self.share(sharing.reads)
        # Without a loss on parts, what a head gives is whole again at once.
        own = [part for part in sharing.parts if part.kind != "head" or sharing.shares_loss]
        of_all = sum(part.activation_bytes for part in sharing.parts)
        around = layer.activation_bytes - of_all
        inside = sum(part.activation_bytes * part.share(self.num_ranks) for part in own)
        gathered = 0.0
        if sharing.split == "sequence" and not sharing.regathers:
            away = 1 - self.share("sequence")
            gathered = sum(away * part.num_sums * part.border_bytes for part in own)
        whole = of_all - sum(part.activation_bytes for part in own)
        kept = max(around, 0) * self.share(sharing.divides) + inside + gathered + whole
        return kept / layer.activation_bytes

    def inside(self, sharing: Sharing) -> tuple[Traffic, Traffic]:
        """Communication of a layer's parts: forward, and backward."""
        forward = backward = NOTHING
        for part in sharing.parts:
            if part.kind == "head":
                given, returned = self._of_head(part, sharing)
            elif part.kind == "embedding":
                given = self.convert("partial", sharing.gives, part.output_bytes)
                returned = self.convert(sharing.gives, "whole", part.output_bytes)
            else:
                given, returned = self._of_pair(part, sharing)
            forward, backward = forward + given, backward + returned
        return forward, backward

    def _of_head(self, part: LayerPart, sharing: Sharing) -> tuple[Traffic, Traffic]:
        read = self.convert(sharing.reads, "whole", part.border_bytes)
        returned = self.convert("partial", sharing.reads, part.border_bytes)
        if not sharing.shares_loss:
            return read + self.convert("features", "whole", part.output_bytes), returned
        # The largest logit, the sum of their powers and that of the target: next to nothing.
        few = self.all_reduce(1)
        return read + few + few + few, returned

    def _of_pair(self, part: LayerPart, sharing: Sharing) -> tuple[Traffic, Traffic]:
        forward = backward = NOTHING
        for _ in range(part.num_sums):
            read = self.convert(sharing.reads, "whole", part.border_bytes)
            forward += read + self.convert("partial", sharing.gives, part.output_bytes)
            backward += self.convert(sharing.gives, "whole", part.output_bytes)
            backward += self.convert("partial", sharing.reads, part.border_bytes)
            if sharing.regathers:
                backward += read
        return forward, backward

    def convert(self, have: GradientLayout, want: TensorLayout, num_bytes: float) -> Traffic:
        """Bring a value from one layout into another.

        From a part to the whole is an all-gather, from a partial sum to the whole an all-reduce, to
        a part of it a reduce-scatter, from rows to features or back an all-to-all. Taking a part of
        the whole costs nothing.

        Args:
            have, want: the layouts.
            num_bytes: of the whole value.
        """
        if have in (want, "whole") or not num_bytes or self.num_ranks == 1:
            return NOTHING
        if have == "partial":
            if want == "whole":
                return self.all_reduce(num_bytes)
            return self._steps(self._others(want, num_bytes))
        if want == "whole":
            return self._steps(self._others(have, num_bytes))
        # Of its part by one measure, a device keeps its part by the other.
        away = (self.num_ranks - 1) / self.num_ranks
        part = self.share("rows" if "rows" in (have, want) else "features")
        return self._steps(away * part * num_bytes)

    def all_reduce(self, num_bytes: float) -> Traffic:
        """Sum a value over the ring: 2(t-1)/t of its bytes pass every link, in 2(t-1) steps."""
        if not num_bytes or self.num_ranks == 1:
            return NOTHING
        half = self._steps((self.num_ranks - 1) / self.num_ranks * num_bytes)
        return half + half

    def _others(self, layout: GradientLayout, num_bytes: float) -> float:
        """The parts of all other devices; uneven ones are no more than everything."""
        part = self.share("rows" if layout == "rows" else "features")
        return min((self.num_ranks - 1) * part, 1.0) * num_bytes

    def _steps(self, num_bytes: float) -> Traffic:
        waits = (self.num_ranks - 2) * self.link.latency_seconds
        return Traffic(waits + self.link.seconds(num_bytes), num_bytes)


_MOST_STATES = 512
"""Chains have 3, transformers and ResNets a few dozen; more are only needed where many values that
are read again much later are alive at once."""


class _LayerValue(NamedTuple):
    """A value that a layer hands on: its output, or a skip."""

    num_bytes: int
    last: int  # who reads it last; whoever makes it, if nobody does
    trains: bool  # whether its gradient is asked for


class _Live(NamedTuple):
    """A value that is still to be read, and what its readers so far have paid for."""

    value: int
    layout: TensorLayout
    copies: frozenset[TensorLayout] = frozenset()
    gradients: frozenset[GradientLayout] = frozenset()


State = tuple[_Live, ...]


class Step(NamedTuple):
    """The needs of one layer, as the search asks of them.

    Attributes:
        forward, backward: communication, per microbatch.
        copied_bytes: of what the forward's collectives bring.
        state: the layout of all values that are still to be read.
    """

    forward: Traffic
    backward: Traffic
    copied_bytes: float
    state: State


class _Trail(NamedTuple):
    """The choices so far, the last one first."""

    sharing: Sharing
    before: _Trail | None


class Solution(NamedTuple):
    """A choice for every layer.

    Attributes:
        sharings: in execution order.
        seconds: what a minibatch takes.
        exact: whether nothing that is allowed is faster.
    """

    sharings: tuple[Sharing, ...]
    seconds: float
    exact: bool


class LayoutProblem:
    """The choice of layouts for one model on one group of devices."""

    def __init__(self, graph: LayerGraph, ring: DeviceRing, num_microbatches: int) -> None:
        self.graph = graph
        self.ring = ring
        self.num_microbatches = num_microbatches
        self._values: list[_LayerValue] = []
        self._made_by: list[list[int]] = [[] for _ in graph.layers]
        self._read_by: list[set[int]] = [set() for _ in graph.layers]
        self._collect_values()

    def _collect_values(self) -> None:
        layers = self.graph.layers
        place = {layer.name: index for index, layer in enumerate(layers)}
        sources = [set(read) for read in sources_of(self.graph)]
        readers: list[list[int]] = [[] for _ in layers]
        for index, read in enumerate(sources):
            for source in read:
                readers[source].append(index)
        for index, layer in enumerate(layers):
            for name in layer.skip_bytes:
                sources[place[name]].add(index)
        trains: list[bool] = []
        for index, layer in enumerate(layers):
            trained = layer.parameter_bytes > 0 or any(trains[source] for source in sources[index])
            trains.append(trained)
            self._add_value(index, readers[index], layer.output_bytes, trained)
            for name, num_bytes in layer.skip_bytes.items():
                self._add_value(index, [place[name]], num_bytes, trained)

    def _add_value(self, maker: int, readers: Sequence[int], num_bytes: int, trains: bool) -> None:
        value = len(self._values)
        self._values.append(_LayerValue(num_bytes, max(readers, default=maker), trains))
        self._made_by[maker].append(value)
        for reader in readers:
            self._read_by[reader].add(value)

    def solve(
        self, allowed: Callable[[Layer], Sequence[Sharing]], seconds_per_byte: float = 0.0
    ) -> Solution:
        """The fastest choice among those that ``allowed`` names for each layer.

        Args:
            seconds_per_byte: that a minibatch may take longer for a byte less on each device.
        """
        best: dict[State, tuple[float, _Trail | None]] = {(): (0.0, None)}
        exact = True
        for index, layer in enumerate(self.graph.layers):
            reached: dict[State, tuple[float, _Trail | None]] = {}
            for sharing in allowed(layer):
                work = self._work_seconds(layer, sharing)
                if seconds_per_byte:
                    work += seconds_per_byte * self.device_bytes(layer, sharing)
                inside = self.ring.inside(sharing)
                for state, (seconds, trail) in best.items():
                    step = self._step(state, index, sharing, inside)
                    talk = step.forward.seconds + step.backward.seconds
                    total = seconds + work + self.num_microbatches * talk
                    if step.state not in reached or total < reached[step.state][0]:
                        reached[step.state] = (total, _Trail(sharing, trail))
            if len(reached) > _MOST_STATES:
                exact = False
                reached = dict(sorted(reached.items(), key=lambda item: item[1][0])[:_MOST_STATES])
            best = reached
        cost, last = min(best.values(), key=lambda entry: entry[0])
        sharings = _unwound(last)
        return Solution(sharings, self._seconds(sharings) if seconds_per_byte else cost, exact)

    def _seconds(self, sharings: Sequence[Sharing]) -> float:
        return sum(
            self._work_seconds(layer, sharing)
            + self.num_microbatches * (step.forward.seconds + step.backward.seconds)
            for layer, sharing, step in self.walk(sharings)
        )

    def device_bytes(self, layer: Layer, sharing: Sharing) -> float:
        """Bytes that a layer takes on a device with one microbatch in flight."""
        parameters = self.ring.parameter_share(layer, sharing)
        return (
            parameters * layer.trained_bytes
            + self.ring.kept_share(layer, sharing) * layer.activation_bytes
        )

    def walk(self, sharings: Sequence[Sharing]) -> Iterator[tuple[Layer, Sharing, Step]]:
        """The layers in execution order, each with its choice and what that takes."""
        state: State = ()
        for index, (layer, sharing) in enumerate(zip(self.graph.layers, sharings, strict=True)):
            step = self._step(state, index, sharing, self.ring.inside(sharing))
            yield layer, sharing, step
            state = step.state

    def reduction(self, layer: Layer, sharing: Sharing) -> Traffic:
        """The sum of a layer's gradients, where devices have seen different rows."""
        if sharing.divides == "sequence":
            own = self.ring.parameter_share(layer, sharing) * layer.summed_bytes
            divided = sum(
                part.parameter_bytes * part.share(self.ring.num_ranks) for part in sharing.parts
            )
            return self.ring.all_reduce(max(own - divided, 0.0))
        if sharing.divides != "rows":
            return NOTHING
        return self.ring.all_reduce(layer.summed_bytes)

    def moved_bytes(self, sharings: Sequence[Sharing]) -> int:
        """Bytes that all devices together send in a minibatch."""
        total = 0.0
        for layer, sharing, step in self.walk(sharings):
            talk = step.forward.num_bytes + step.backward.num_bytes
            total += self.num_microbatches * talk + self.reduction(layer, sharing).num_bytes
        return round(self.ring.num_ranks * total)

    def _work_seconds(self, layer: Layer, sharing: Sharing) -> float:
        """Seconds of a layer's compute, updates and sum of gradients in a minibatch."""
        compute = self.num_microbatches * layer.compute_seconds * self.ring.work_share(sharing)
        update = layer.update_seconds * self.ring.parameter_share(layer, sharing)
        return compute + update + self.reduction(layer, sharing).seconds

    def _step(
        self, state: State, index: int, sharing: Sharing, inside: tuple[Traffic, Traffic]
    ) -> Step:
        """Let a layer read its inputs and hand on its outputs.

        Args:
            inside: ``DeviceRing.inside`` of the sharing.
        """
        forward, backward, copied = NOTHING, NOTHING, 0.0
        after: list[_Live] = []
        for live in state:
            value, read = self._values[live.value], live
            if live.value in self._read_by[index]:
                there, back, read = self._read(live, sharing)
                forward, backward = forward + there, backward + back
                if there.num_bytes:
                    copied += self.ring.share(sharing.reads) * value.num_bytes
            if value.last > index:
                after.append(read)
        if sharing.split == "row":
            num_bytes = self.graph.layers[index].output_bytes
            forward += self.ring.convert("partial", sharing.gives, num_bytes)
            backward += self.ring.convert(sharing.gives, "whole", num_bytes)
        there, back = inside
        forward, backward = forward + there, backward + back
        for number in self._made_by[index]:
            if self._values[number].last > index:
                after.append(_Live(number, sharing.gives))
            else:
                there, back = self._to_the_loss(self._values[number], sharing)
                forward, backward = forward + there, backward + back
        return Step(forward, backward, copied, tuple(after))

    def _read(self, live: _Live, sharing: Sharing) -> tuple[Traffic, Traffic, _Live]:
        """(traffic there, traffic back, the value then) for one more reader. A copy that an earlier
        one had made is there already, and gradients held alike are added up before they travel."""
        value = self._values[live.value]
        there = min(
            (
                self.ring.convert(copy, sharing.reads, value.num_bytes)
                for copy in (live.layout, *sorted(live.copies))
            ),
            key=lambda traffic: (traffic.seconds, traffic.num_bytes),
        )
        back = NOTHING
        if value.trains and sharing.returns not in live.gradients:
            back = self.ring.convert(sharing.returns, live.layout, value.num_bytes)
        # What was free is not noted: fewer states are to be told apart.
        if there.num_bytes:
            live = live._replace(copies=live.copies | {sharing.reads})
        if back.num_bytes:
            live = live._replace(gradients=live.gradients | {sharing.returns})
        return there, back, live

    def _to_the_loss(self, value: _LayerValue, sharing: Sharing) -> tuple[Traffic, Traffic]:
        """(traffic there, traffic back) of the model's output: a loss needs all features of a row,
        and all devices or those that have the row can compute it."""
        places: tuple[TensorLayout, ...] = ("rows", "whole")
        if sharing.gives in places:
            return NOTHING, NOTHING
        ways = (
            (
                self.ring.convert(sharing.gives, place, value.num_bytes),
                self.ring.convert(place, sharing.gives, value.num_bytes if value.trains else 0),
            )
            for place in places
        )
        return min(ways, key=lambda pair: pair[0].seconds + pair[1].seconds)


def _unwound(trail: _Trail | None) -> tuple[Sharing, ...]:
    chosen: list[Sharing] = []
    while trail is not None:
        chosen.append(trail.sharing)
        trail = trail.before
    return tuple(reversed(chosen))
