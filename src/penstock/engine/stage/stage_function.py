"""A stage as a function of tensors, as which its passes can be traced; what such a function cannot
say is refused by the layer's name.

Weights and buffers are among what it takes, so passes read those of the moment in which they run.
Buffers that layers write come out as results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.base.errors import ModelError
from penstock.engine.model import tree
from penstock.engine.model.modes import Args, DispatchMode, Named
from penstock.engine.model.randomness import LayerStreams, draws
from penstock.engine.model.spine import NamedLayer, Skip
from penstock.engine.stage.layer_runs import LayerRuns
from penstock.engine.stage.microbatch_graph import scalar
from penstock.engine.tracing.layers import units_of

V = TypeVar("V")

TENSOR = object()
"""Stands for a tensor among the leaves of a value."""


class TensorSlot(NamedTuple):
    """Where a module holds a parameter or buffer.

    Attributes:
        holder: the module's dictionary.
        name: the key in it.
    """

    holder: dict[str, Any]
    name: str

    @property
    def now(self) -> Tensor:
        """The tensor that is there."""
        tensor: Tensor = self.holder[self.name]
        return tensor


class StageSlots:
    """Where a stage's modules hold their parameters and buffers.

    Args:
        modules: each once.

    Attributes:
        parameters: a slot of each parameter.
        buffers: a slot of each buffer.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
        self._slots: list[tuple[TensorSlot, int]] = []
        self.parameters = self._found([module._parameters for module in modules], 0)
        self.buffers = self._found([module._buffers for module in modules], len(self.parameters))

    def _found(self, holders: Iterable[dict[str, Any]], start: int) -> list[TensorSlot]:
        numbers: dict[int, int] = {}
        first: list[TensorSlot] = []
        for holder in holders:
            for name, tensor in holder.items():
                if tensor is None:
                    continue
                if id(tensor) not in numbers:
                    numbers[id(tensor)] = start + len(first)
                    first.append(TensorSlot(holder, name))
                self._slots.append((TensorSlot(holder, name), numbers[id(tensor)]))
        return first

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Modules compute with other tensors, those for parameters first; each slot is as before
        behind it."""
        before = [slot.now for slot, _ in self._slots]
        flat = [module._flat_weights for module in self._recurrent]
        for slot, number in self._slots:
            slot.holder[slot.name] = values[number]
        for module in self._recurrent:
            module._flat_weights = [
                module._parameters.get(name) for name in module._flat_weights_names
            ]
        try:
            yield
        finally:
            for (slot, _), tensor in zip(self._slots, before, strict=True):
                slot.holder[slot.name] = tensor
            for module, weights in zip(self._recurrent, flat, strict=True):
                module._flat_weights = weights


class _Watched(DispatchMode):
    """Around a layer that is traced: refuses what its passes could not do again.

    Args:
        layer: what errors call it.
    """

    drew = False

    def __init__(self, layer: str) -> None:
        super().__init__()
        self._layer = layer

    def call(self, func: Any, args: Args, named: Named) -> Any:
        """Run ``func`` if it can be part of a compiled pass."""
        if draws(func, args, named):
            raise self._refused(
                f"draws random numbers ({func}), which compiled passes do not; give it no dropout, "
                "put it into evaluation mode"
            )
        self._check_held(func, args, named)
        try:
            return func(*args, **named)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self._refused(
                f"asks for values of a tensor ({func}), on which its code may depend, and a "
                "compiled pass is the same for all values; compute with torch.where or the like"
            ) from error

    def _check_held(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at tensors that a layer holds as nothing that modules know of."""
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if not isinstance(value, Tensor) or isinstance(value, FunctionalTensor):
                continue
            if value.requires_grad:
                raise self._refused(
                    "computes with a parameter through a reference of its own, which a compiled "
                    "pass would not train; read it as an attribute of its module"
                )
            if argument.alias_info is not None and argument.alias_info.is_write:
                raise self._refused(
                    f"writes into a tensor that is no buffer of its ({func}); register it with "
                    "register_buffer"
                )

    def _refused(self, text: str) -> ModelError:
        return ModelError(f"{self._layer} {text}, or leave compile=… out")


class _WatchingStreams(LayerStreams):
    """Stands for random streams while a stage is traced, in which no layer may draw.

    Args:
        names: by index in the whole model, what errors call the layers.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(0)
        self._names = names

    def stream(
        self, layer: int, training: bool, step: int, microbatch: int, part: int = 0
    ) -> AbstractContextManager[Any]:
        """The context in which a layer is traced."""
        return _Watched(self._names[layer])

    def learn(self, layer: int, training: bool, stream: object) -> None:
        """Learn nothing: every layer is watched every time."""


class Nested(NamedTuple):
    """What of a value is no tensor.

    Attributes:
        structure: of the value.
        leaves: in their order, with ``TENSOR`` in the place of each tensor.
    """

    structure: tree.Structure
    leaves: tuple[Any, ...]

    @classmethod
    def apart(cls, value: Any) -> tuple[list[Tensor], Nested]:
        """The tensors of a value, and the rest of it."""
        if type(value) is Tensor:
            return [value], _ONE_TENSOR
        leaves, structure = tree.flatten(value)
        rest = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)], cls(structure, rest)

    def together(self, tensors: Sequence[Tensor]) -> Any:
        """The value with these tensors in it."""
        if self is _ONE_TENSOR:
            return tensors[0]
        return tree.unflatten(self.spread(tensors, self.leaves), self.structure)

    def spread(self, values: Iterable[V], others: Iterable[V]) -> list[V]:
        """One value per leaf: the next of ``values`` for a tensor, else that of ``others``."""
        remaining = iter(values)
        return [
            next(remaining) if leaf is TENSOR else other
            for leaf, other in zip(self.leaves, others, strict=True)
        ]

    @property
    def num_tensors(self) -> int:
        """How many tensors there are in the value."""
        return sum(leaf is TENSOR for leaf in self.leaves)


_ONE_TENSOR = Nested(tree.flatten(torch.empty(0))[1], (TENSOR,))


def _each_apart(values: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Nested]]:
    """``Nested.apart`` of each of some values: all their tensors, and the rests by name."""
    tensors: list[Tensor] = []
    rests: dict[str, Nested] = {}
    for key, value in values.items():
        more, rests[key] = Nested.apart(value)
        tensors += more
    return tensors, rests


class GivenParts(NamedTuple):
    """What a forward is given beside weights and buffers, without its tensors.

    Attributes:
        inputs: of the stage.
        skips: what earlier stages stashed, by key.
        targets: what the loss compares with; of no tensors where there is no loss.
    """

    inputs: Nested
    skips: dict[str, Nested]
    targets: Nested

    @classmethod
    def apart(
        cls, inputs: Any, skips: Mapping[str, Any], targets: Any
    ) -> tuple[list[Tensor], GivenParts]:
        """The tensors that a forward is given, inputs first and targets last, and the rest."""
        tensors, own = Nested.apart(inputs)
        of_skips, rests = _each_apart(skips)
        more, wanted = Nested.apart(targets)
        return [*tensors, *of_skips, *more], cls(own, rests, wanted)

    def together(self, tensors: Sequence[Tensor]) -> tuple[Any, dict[str, Any], Any]:
        """(inputs, skips, targets) with these tensors in them."""
        remaining = iter(tensors)

        def next_of(part: Nested) -> Any:
            return part.together(list(islice(remaining, part.num_tensors)))

        inputs = next_of(self.inputs)
        skips = {key: next_of(part) for key, part in self.skips.items()}
        return inputs, skips, next_of(self.targets)


class ResultParts(NamedTuple):
    """What a traced forward has given, without its tensors.

    Attributes:
        output: of the stage, or the loss.
        stashed: the skips for later stages, by key.
        seen: the output from which the loss was made, where somebody looks at it.
        wants_gradient: of each tensor, in this order and that of the buffers behind it.
        replaced: for each buffer, whether another tensor was put in its place.
        num_borders: how many of the results behind that are what layers have handed to the next
            one, if they are to be recomputed.
    """

    output: Nested
    stashed: dict[str, Nested]
    seen: Nested
    wants_gradient: list[bool]
    replaced: list[bool]
    num_borders: int


class StageFunction:
    """A stage's forward as a function of tensors: its parameters and buffers, and what it is given.

    Args:
        layers: of the stage.
        first_layer: index of the first of them in the whole model.
        state: where they hold what they compute with.
        given: what the tensors are parts of.
        loss: of (output, targets), on the last stage.
        looks: whether the output is wanted, too, from which the loss is made.
        recompute: whether what layers hand to the next one is wanted, too.

    Attributes:
        made: the parts of what the last call has given.
    """

    made: ResultParts

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        first_layer: int,
        state: StageSlots,
        given: GivenParts,
        loss: Callable[[Any, Any], Tensor] | None,
        *,
        looks: bool,
        recompute: bool,
    ) -> None:
        names = {first_layer + at: f"layer {layer.name!r}" for at, layer in enumerate(layers)}
        streams = _WatchingStreams({**names, first_layer + len(layers): "the loss"})
        units = units_of([layer.module for layer in layers]) if recompute else [(0, len(layers))]
        self._runs = [
            LayerRuns(layers[start:stop], first_layer + start, streams, False, num_slices=1)
            for start, stop in units
        ]
        self._watching_loss = streams.stream(first_layer + len(layers), True, 0, 0)
        self._state = state
        self._given = given
        self._loss = loss
        self._looks = looks

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Run the layers, with the tensors in their places; nothing given is overwritten."""
        num_parameters = len(self._state.parameters)
        num_own = num_parameters + len(self._state.buffers)
        own = [*tensors[:num_parameters], *(t.clone() for t in tensors[num_parameters:num_own])]
        inputs, skips, targets = self._given.together([t.clone() for t in tensors[num_own:]])
        with self._state.holding(own):
            stashed = {key: Skip.of(skip) for key, skip in skips.items()}
            output, borders = self._run(inputs, stashed)
            seen: Any = None
            if self._loss is not None:
                seen = tree.replace(Tensor, Tensor.detach, output) if self._looks else None
                with self._watching_loss:
                    output = scalar(self._loss(output, targets), training=True)
            buffers = [slot.now for slot in self._state.buffers]
        left = {key: skip.taken(key) for key, skip in stashed.items()}
        replaced = [now is not was for now, was in zip(buffers, own[num_parameters:], strict=True)]
        ends = [buffer.detach() for buffer in buffers] + borders
        results = self._results(output, left, seen, replaced, len(borders))
        results = _apart_from_each_other(tensors, results + ends)
        self.made = self.made._replace(wants_gradient=[end.requires_grad for end in results])
        return results

    def _run(self, value: Any, skips: dict[str, Skip]) -> tuple[Any, list[Tensor]]:
        """The output of the layers, and copies of what passes between those that are recomputed."""
        borders: dict[int, Tensor] = {}
        for number, run in enumerate(self._runs):
            if number:
                passing = tree.tensors([value, [skip.value for skip in skips.values()]])
                borders |= {id(tensor): tensor.detach().clone() for tensor in passing}
            value, _ = run.run(value, skips, (0, 0, 0), again=False)
        return value, list(borders.values())

    def _results(
        self,
        output: Any,
        stashed: dict[str, Any],
        seen: Any,
        replaced: list[bool],
        num_borders: int,
    ) -> list[Tensor]:
        results, output_parts = Nested.apart(output)
        of_skips, stashed_parts = _each_apart(stashed)
        more, seen_parts = Nested.apart(seen)
        self.made = ResultParts(output_parts, stashed_parts, seen_parts, [], replaced, num_borders)
        return [*results, *of_skips, *more]


def _apart_from_each_other(given: Iterable[Tensor], results: Iterable[Tensor]) -> list[Tensor]:
    """Results of which none shares memory with another one or with what was given."""
    met = {_memory(tensor) for tensor in given}
    apart = []
    for tensor in results:
        memory = _memory(tensor)
        apart.append(tensor.clone() if memory in met or tensor._base is not None else tensor)
        met.add(memory)
    return apart


def _memory(tensor: Tensor) -> StorageWeakRef:
    """Tells a tensor's memory from that of others; there need not be any, while one traces."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@contextmanager
def unchanged_attributes(layers: Sequence[NamedLayer]) -> Iterator[None]:
    """A context for a trace: what layers note in attributes that are no state of a module, no
    compiled pass would note.

    Raises:
        ModelError: a layer has done so; its attributes are as before.
    """
    named = [
        (f"layer {layer.name!r}", name, vars(module))
        for layer in layers
        for name, module in layer.module.named_modules()
    ]
    before = [dict(attributes) for _, _, attributes in named]
    changed: list[str] = []
    try:
        yield
    finally:
        for (layer_name, name, attributes), then in zip(named, before, strict=True):
            others = [key for key in {**then, **attributes} if _is_other(key, then, attributes)]
            if others:
                attributes.clear()
                attributes.update(then)
                changed.append(f"{layer_name} assigns {'.'.join(filter(None, (name, others[0])))}")
    if changed:
        raise ModelError(
            f"{changed[0]} in its forward, which compiled passes would not do again; register it "
            "as a buffer, or leave compile=… out"
        )


def _is_other(key: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    restored = key in {"_flat_weights", "_flat_weight_refs"}
    return not restored and (key not in then or key not in now or then[key] is not now[key])
