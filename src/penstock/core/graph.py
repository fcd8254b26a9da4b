"""Costs of a model, layer by layer: ``Layer`` and ``LayerGraph``.

A profile lists layers in execution order. A cut behind any of them makes two stages; what has to
travel there is the output of every layer before the cut that one behind it reads. It knows nothing
of torch, so a plan can be made on another machine, from a file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Literal

from msgspec import field
from msgspec.structs import replace

from penstock.base.errors import InputError, printable
from penstock.base.lazily import method_provided
from penstock.base.values import MOST_BYTES, Value, expect, number, shown, whole
from penstock.core.example import Example
from penstock.core.expert_part import ExpertPart
from penstock.core.layer_part import LayerPart


class Layer(Value, frozen=True, kw_only=True):
    """One indivisible piece of a model and its measured costs for one microbatch.

    Attributes:
        name: qualified name in the model, as in ``state_dict`` keys.
        kind: class name of the module, for people and for tensor parallelism; behind "own" where a
            class of the user's has the name of one of torch's, behind "captured" in a captured
            model. In brackets stands what else decides how it can be divided: ``groups=2`` of a
            convolution, ``heads=4`` of a transformer's layer, ``undivided`` where a weight is
            computed or renormalised, ``draws`` where random numbers are drawn but by dropout
            layers.
        forward_seconds: one forward pass.
        backward_input_seconds: the gradient with respect to the layer's input.
        backward_weight_seconds: the gradient with respect to its parameters; the two together are a
            whole backward.
        split_forward_seconds: what the forward takes longer that prepares for a backward in two
            halves.
        split_seconds: what a backward in two halves takes longer than a whole one.
        recompute_seconds: a forward that runs again before its backward; as long as the first by
            default.
        collective_seconds: of forward and backward, what tensor ranks exchange; 0 in a profile.
        update_seconds: the optimizer's step on its parameters, once per minibatch.
        activation_bytes: what autograd keeps from forward until backward.
        loss_bytes: of these, what the loss behind the last layer keeps: it does not run again where
            layers do.
        mask_bytes: of these, masks that attention keeps: context ranks, among which keys and values
            go round, keep none.
        held_input_bytes: its input, if autograd does not keep that anyway; what a stage that begins
            with it holds besides.
        weight_kept_bytes: what stays between the two halves of a split backward.
        workspace_bytes: what it needs for itself while it runs, beyond what it keeps.
        input_shape: shapes and dtypes of what it was profiled with, in words.
        output_bytes: what it hands to the layers that read it, and as a gradient gets back.
        parameter_bytes: parameters.
        gradient_bytes: their gradients; as many by default. Of weights in half precision whose
            optimizer has masters (``optimizers.master_weights``) twice as many.
        buffer_bytes: what its state has besides, as running statistics.
        optimizer_bytes: the optimizer's state for them, masters included.
        inputs: names of the layers whose outputs it reads; the one before it by default.
        after: names of layers that come before it though it reads nothing of their output; what it
            has of them comes with a skip to a later layer.
        skip_bytes: what it hands past its neighbours, besides its output: bytes by the name of the
            layer that takes it.
        unit: the same for layers in a row that run again together where layers run forward twice;
            empty for one that does alone.
        shared_parameters: bytes of the parameters that other layers hold as well, by their name in
            the model (tied weights).
        signature: shapes and dtypes of the parameters, so that a plan can tell its model.
        spread: of the measured seconds: half the distance between their quartiles over the median.
        warnings: what is odd about its measurements, in words.
        by_positions: whether tensor ranks may have some of its positions each (of dimension 1), but
            for what its parts read.
        by_rows: whether tensor ranks may have some of its rows each, since all that it takes and
            gives has rows.
        parts: what of it tensor ranks can share, where the layer is no module of torch's that they
            can share as such.
        experts: those of mixtures in it, which copies of its stage can divide.
    """

    name: str
    kind: str = ""
    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    split_forward_seconds: float = 0.0
    split_seconds: float = 0.0
    recompute_seconds: float | None = None
    collective_seconds: float = 0.0
    update_seconds: float = 0.0
    activation_bytes: int = 0
    loss_bytes: int = 0
    mask_bytes: int = 0
    held_input_bytes: int = 0
    weight_kept_bytes: int = 0
    workspace_bytes: int = 0
    input_shape: str = ""
    output_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int | None = None
    buffer_bytes: int = 0
    optimizer_bytes: int = 0
    inputs: tuple[str, ...] | None = None
    after: tuple[str, ...] = ()
    skip_bytes: dict[str, int] = field(default_factory=dict)
    unit: str = ""
    shared_parameters: dict[str, int] = field(default_factory=dict)
    signature: str = ""
    spread: float = 0.0
    warnings: tuple[str, ...] = ()
    by_rows: bool = True
    by_positions: bool = False
    parts: tuple[LayerPart, ...] = ()
    experts: tuple[ExpertPart, ...] = ()

    def __post_init__(self) -> None:
        whose = f"layer {shown(self.name)}"
        self.check_fields(whose)
        number(f"{whose}: spread", self.spread)
        for name, num_bytes in self.shared_parameters.items():
            whole(f"{whose}: shared_parameters[{name!r}]", num_bytes, 0, MOST_BYTES)

    @property
    def backward_seconds(self) -> float:
        """The full backward: input and weight gradients together."""
        return self.backward_input_seconds + self.backward_weight_seconds

    @property
    def summed_bytes(self) -> int:
        """Bytes of the gradients in which parameters sum those of microbatches."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def trained_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.summed_bytes + self.optimizer_bytes

    @property
    def compute_seconds(self) -> float:
        """Forward and full backward of one microbatch."""
        return self.forward_seconds + self.backward_seconds

    def paced(self, ahead: float, back: float) -> Layer:
        """This layer with passes that take so many times as long: forwards, and backwards."""
        again = self.recompute_seconds
        return replace(
            self,
            forward_seconds=ahead * self.forward_seconds,
            split_forward_seconds=ahead * self.split_forward_seconds,
            recompute_seconds=None if again is None else ahead * again,
            backward_input_seconds=back * self.backward_input_seconds,
            backward_weight_seconds=back * self.backward_weight_seconds,
            split_seconds=back * self.split_seconds,
        )


_MOST_CONTENTION = 1000
_MOST_ROWS = 2**31
_MOST_SUM = 2**56

Mode = Literal["whole", "split", "stream"]
"""How ranks work: with whole backwards, with backwards in two halves, or without a flush and with
several versions of weights."""


class Contention(Value, frozen=True, kw_only=True):
    """How many times longer ranks of one machine take than their layers did alone: they share its
    memory and, as threads, the interpreter; they wait and wake up; versions of weights are copied.
    Measured with one microbatch size and one number of ranks, and taken for all: with much smaller
    microbatches, or more ranks, the truth is more.

    Attributes:
        whole: forwards and backwards of a schedule with whole backwards.
        split: the same where backwards come in two halves.
        stream: the same without a flush.
        update: optimizer steps.
        stream_update: the same without a flush.
        whole_spread, split_spread, stream_spread: how far each factor of passes may be off, as a
            share of it: the standard error of a median over rounds, 0 where nobody says.
        num_ranks: with which it was measured; 0 if nobody did.
        num_rounds: that count; 0 if the machine was too busy for any, and processor time had to
            stand for time.
        num_rejected: rounds that do not count, since something else disturbed them.
        others_share: of the time of the cores, what other programs had in the usual round.

    Raises:
        InputError: a factor is not above 0, or so large that it cannot be meant; a spread, share or
            count is negative.
    """

    whole: float = 1.0
    split: float = 1.0
    stream: float = 1.0
    update: float = 1.0
    stream_update: float = 1.0
    whole_spread: float = 0.0
    split_spread: float = 0.0
    stream_spread: float = 0.0
    num_ranks: int = 0
    num_rounds: int = 0
    num_rejected: int = 0
    others_share: float = 0.0

    def __post_init__(self) -> None:
        self.check_fields()
        for name in ("whole", "split", "stream", "update", "stream_update"):
            factor = getattr(self, name)
            if not 0 < factor <= _MOST_CONTENTION:
                raise InputError(
                    f"contention: {name} is {factor}, but must be > 0 and ≤ {_MOST_CONTENTION:,}"
                )
        for name in ("num_ranks", "num_rounds", "num_rejected"):
            whole(f"contention: {name}", getattr(self, name), 0)
        for name in ("whole_spread", "split_spread", "stream_spread", "others_share"):
            number(f"contention: {name}", getattr(self, name))

    def of_passes(self, mode: Mode) -> float:
        """The factor by which ranks slow each other's forwards and backwards."""
        return {"whole": self.whole, "split": self.split, "stream": self.stream}[mode]

    def of_updates(self, mode: Mode) -> float:
        """The factor by which ranks slow each other's optimizer steps."""
        return self.stream_update if mode == "stream" else self.update

    def spread_of(self, mode: Mode) -> float:
        """How far the factor of passes may be off, as a share of it."""
        return {
            "whole": self.whole_spread, "split": self.split_spread, "stream": self.stream_spread
        }[mode]  # fmt: skip

    def shifted(self, num_spreads: float) -> Contention:
        """The contention if every factor of passes were off by so many of its spreads."""

        def moved(mode: Mode) -> float:
            factor = self.of_passes(mode) * (1 + num_spreads * self.spread_of(mode))
            return min(max(factor, 1 / _MOST_CONTENTION), _MOST_CONTENTION)

        return replace(self, whole=moved("whole"), split=moved("split"), stream=moved("stream"))

    def __str__(self) -> str:
        if not self.num_ranks:
            return "what ranks that share a machine cost each other was not measured"
        rejected = f", {self.num_rejected} rejected" if self.num_rejected else ""
        others = f"; others had {self.others_share:.0%} of its cores" if self.others_share else ""
        measured = self.num_rounds or self.num_rejected
        rounds = f" ({self.num_rounds} rounds{rejected}{others})" if measured else ""
        return (
            f"on {self.num_ranks} ranks that share a machine, passes take {self._told('whole')} "
            f"times as long (backwards in halves {self._told('split')}, without a flush "
            f"{self._told('stream')}), updates {self.update:.2f} (without a flush "
            f"{self.stream_update:.2f}){rounds}"
        )

    def _told(self, mode: Mode) -> str:
        return f"{self.of_passes(mode):.2f} ± {self.spread_of(mode):.1%}"


class Estimate(Value, frozen=True, kw_only=True):
    """Says that a graph was not measured but estimated, and how far that may be off.

    Attributes:
        device: short name of the hardware that it was estimated for.
        software: short name of the software stack.
        error: the error to expect of a step, as a share: the median of what is known.
        basis: from what that is known, in words.
    """

    device: str
    software: str = ""
    error: float = 0.0
    basis: str = ""

    def __post_init__(self) -> None:
        self.check_fields("estimate")
        number("estimate: error", self.error)

    @property
    def mark(self) -> str:
        """A few words that stand wherever figures of it do."""
        return f"estimated for {self.device}, ± {self.error:.0%}"

    def __str__(self) -> str:
        by = f", {self.software}" if self.software else ""
        return (
            f"estimated for {self.device}{by}, not measured: expect a step to be off by about "
            f"{self.error:.0%} ({self.basis})"
        )


class LayerGraph(Value, frozen=True, kw_only=True):
    """A profiled or estimated model: its layers in execution order.

    Attributes:
        layers: in execution order, names unique, at least one.
        microbatch_size: rows of the sample that was profiled; every cost is for one such
            microbatch.
        input_bytes: size of the model's own input for one microbatch.
        hop_seconds: measured overhead of handing one message to a neighbouring worker, or 0.
        op_seconds: measured overhead of one op (F, B, I or W) of a stage beyond its layers, or 0.
        sum_bytes_per_second: measured: gradients of another holder of the same weights that a
            worker adds to its own; 0 where nobody says, and then it costs nothing.
        moved_bytes_per_second: measured: bytes that another thread adds up and moves until what is
            computed meanwhile has lost a second; 0 where nobody says, and then nothing is lost.
        new_bytes_per_second: measured: bytes of new memory whose pages the system makes in a
            second; 0 where nobody says, and then it costs nothing.
        contention: how many times longer everything takes on ranks that share a machine.
        num_threads: intra-op threads it was measured with; a worker gets as many.
        device: what it was measured on, for people.
        dtype: that of the parameters, for people.
        software: versions of what it was measured with, by name.
        other_sizes: the same model measured with microbatches of other sizes.
        warnings: what is odd about the profile as a whole, in words.
        example: with what the model was traced, if it names no spine.
        estimate: that nobody measured it, and what error to expect; ``None`` if somebody did.
    """

    layers: tuple[Layer, ...]
    microbatch_size: int = 1
    input_bytes: int = 0
    hop_seconds: float = 0.0
    op_seconds: float = 0.0
    sum_bytes_per_second: float = 0.0
    moved_bytes_per_second: float = 0.0
    new_bytes_per_second: float = 0.0
    contention: Contention = Contention()
    num_threads: int = 1
    device: str = ""
    dtype: str = ""
    software: dict[str, str] = field(default_factory=dict)
    other_sizes: tuple[LayerGraph, ...] = ()
    warnings: tuple[str, ...] = ()
    example: Example | None = None
    estimate: Estimate | None = None

    def __post_init__(self) -> None:
        self.check_fields()
        if not self.layers:
            raise InputError("a LayerGraph needs at least one layer")
        counts = Counter(layer.name for layer in self.layers)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            raise InputError(f"layer names must be unique, but {', '.join(repeated)} repeat")
        for name in ("microbatch_size", "num_threads"):
            whole(name, getattr(self, name), 1, _MOST_ROWS)
        self._check_sum()
        self._check_order()
        self._check_other_sizes()

    def _check_sum(self) -> None:
        names = [name for name in Layer.__struct_fields__ if name.endswith("_bytes")]
        for name in names:
            parts = (getattr(layer, name) for layer in self.layers)
            total = sum(
                sum(part.values()) if isinstance(part, dict) else part or 0 for part in parts
            )
            whole(f"the layers' {name} in all", total, 0, _MOST_SUM)

    def _check_order(self) -> None:
        place = {layer.name: index for index, layer in enumerate(self.layers)}
        for index, layer in enumerate(self.layers):
            for name in (*(layer.inputs or ()), *layer.after):
                if place.get(name, index) >= index:
                    raise InputError(f"layer {layer.name!r} reads {name!r}, no layer before it")
            for name in layer.skip_bytes:
                if place.get(name, -1) <= index:
                    raise InputError(f"layer {layer.name!r} skips to {name!r}, no layer behind it")

    def _check_other_sizes(self) -> None:
        sizes = [self.microbatch_size]
        for other in self.other_sizes:
            if other.other_sizes or other.fingerprint != self.fingerprint:
                raise InputError(
                    f"other_sizes: the profile with microbatches of {other.microbatch_size} is of "
                    "another model or has other sizes of its own; give one profile per size"
                )
            sizes.append(other.microbatch_size)
        if len(set(sizes)) < len(sizes):
            raise InputError(
                f"other_sizes: two profiles have microbatches of the same size: {sizes}"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The microbatch sizes that were measured, ascending."""
        return tuple(sorted((self.microbatch_size, *(o.microbatch_size for o in self.other_sizes))))

    def at(self, microbatch_size: int) -> LayerGraph:
        """The profile with microbatches of this size.

        Raises:
            InputError: it was not measured.
        """
        for graph in (self, *self.other_sizes):
            if graph.microbatch_size == microbatch_size:
                return graph
        measured = ", ".join(map(str, self.sizes))
        raise InputError(
            f"the profile has no microbatches of {shown(microbatch_size)}, only of {measured}; "
            "measure it with that size too"
        )

    @property
    def crossing_bytes(self) -> tuple[int, ...]:
        """The bytes that travel over a cut behind each layer but the last: every output that is
        read behind it, once, and every skip."""
        change = [0] * (len(self.layers) + 1)
        for start, stop, num_bytes in self._spans():
            change[start] += num_bytes
            change[stop] -= num_bytes
        return tuple(accumulate(change[: len(self.layers) - 1]))

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """(producer, last reader, bytes) of everything that is handed on."""
        place = {layer.name: index for index, layer in enumerate(self.layers)}
        last = list(range(len(self.layers)))
        for index, layer in enumerate(self.layers):
            before = (index - 1,) if index else ()
            sources = before if layer.inputs is None else map(place.__getitem__, layer.inputs)
            for source in sources:
                last[source] = index  # in execution order, so the last one stays
            for name, num_bytes in layer.skip_bytes.items():
                yield index, place[name], num_bytes
        for index, layer in enumerate(self.layers):
            yield index, last[index], layer.output_bytes

    def reordered(self, names: Sequence[str]) -> LayerGraph:
        """The same model with its layers in another order, and every layer's inputs named.

        Args:
            names: of all layers.

        Raises:
            InputError: not the names of all layers, or a layer comes before one that it reads.
        """
        expect(names, list | tuple, "an order of layers", "give a list of their names")
        by_name = {layer.name: layer for layer in self.layers}
        if {*map(type, names)} - {str} or sorted(names) != sorted(by_name):
            raise InputError("an order of layers must name each of them once")
        before = ("", *(layer.name for layer in self.layers))
        named = {
            layer.name: (layer.inputs if layer.inputs is not None else (last,) if last else ())
            for layer, last in zip(self.layers, before, strict=False)
        }
        return replace(
            self,
            layers=tuple(replace(by_name[name], inputs=named[name]) for name in names),
            other_sizes=tuple(other.reordered(names) for other in self.other_sizes),
        )

    def with_blocks(self, name: str, count: int) -> LayerGraph:
        """The profile of a model with another number of blocks that are all alike: what its small
        twin measured, as many times as it has blocks. Nobody ever needs the whole model for it.

        Args:
            name: of the list of blocks in the model, as ``"model.layers"``.
            count: how many blocks the model has, at least as many as this one, which has two or
                more. The second is repeated.

        Raises:
            InputError: there are no such blocks, too many of them, or their layers do not stand
                together.
        """
        own = re.compile(rf"(?<![\w.]){re.escape(name)}\.(\d+)(?![\w])")
        places = (own.match(layer.name) for layer in self.layers)
        numbers = [None if place is None else int(place[1]) for place in places]
        inside = [number for number in numbers if number is not None]
        least = max(inside, default=0) + 1
        if least < 2 or inside != sorted(inside):
            raise InputError(
                f"{name!r} is no list of two or more blocks in a row; give the name of one, as in "
                "'model.layers', and profile a model that has two"
            )
        more = whole("count", count, least) - least

        def moved(layer: Layer, by: int, since: int) -> Layer:
            """With the numbers of blocks from ``since`` on so much higher."""

            def number(block: re.Match[str]) -> str:
                return f"{name}.{int(block[1]) + by * (int(block[1]) >= since)}"

            text = partial(own.sub, number)
            return replace(
                layer,
                name=text(layer.name),
                unit=text(layer.unit),
                signature=text(layer.signature),
                inputs=None if layer.inputs is None else tuple(map(text, layer.inputs)),
                after=tuple(map(text, layer.after)),
                skip_bytes={text(key): value for key, value in layer.skip_bytes.items()},
                parts=tuple(part.renamed(text) for part in layer.parts),
                experts=tuple(part.renamed(text) for part in layer.experts),
            )

        start, end = numbers.index(1), len(numbers) - numbers[::-1].index(1)
        every = self.layers[start:end]
        copies = (moved(layer, by, 0) for by in range(1, more + 1) for layer in every)
        behind = (moved(layer, more, 1) for layer in self.layers[end:])
        return replace(
            self,
            layers=(*self.layers[:end], *copies, *behind),
            other_sizes=tuple(other.with_blocks(name, count) for other in self.other_sizes),
        )

    def __str__(self) -> str:
        forward = sum(layer.forward_seconds for layer in self.layers)
        backward = sum(layer.backward_seconds for layer in self.layers)
        update = sum(layer.update_seconds for layer in self.layers)
        words = "\n".join(
            [
                f"{len(self.layers)} layers, a microbatch of {self.microbatch_size} rows: forward "
                f"{forward * 1e3:.3f} ms, backward {backward * 1e3:.3f} ms, update "
                f"{update * 1e3:.3f} ms",
                str(self.contention if self.estimate is None else self.estimate),
                *self._mixtures(),
                *(f"! {warning}" for warning in self.warnings),
            ]
        )
        return printable(words)

    def _mixtures(self) -> Iterator[str]:
        """How evenly tokens come to experts, a line for each mixture where that was measured."""
        for part in (part for layer in self.layers for part in layer.experts):
            if part.loads:
                share = max(part.loads)
                yield (
                    f"{part.name}: {part.num_experts} experts, of which the busiest, number "
                    f"{part.loads.index(share)}, gets {share:.0%} of the tokens"
                )

    _repr_html_ = method_provided("graph_cell")

    @property
    def fingerprint(self) -> str:
        """A hash of layer names and parameter shapes: the same for the same architecture."""
        return fingerprint((layer.name, layer.signature) for layer in self.layers)


def fingerprint(names_and_signatures: Iterable[tuple[str, str]]) -> str:
    """The hash by which a plan recognises its model (16 hexadecimal digits)."""
    text = "\n".join(f"{name}:{signature}" for name, signature in names_and_signatures)
    import hashlib  # OpenSSL takes as long to load as all of the rest here

    return hashlib.sha256(text.encode()).hexdigest()[:16]
