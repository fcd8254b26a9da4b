"""A stage whose forward and backward are one call each, without a graph of autograd between them.

The first forward of its kind traces the stage's layers with their backward as one graph, which is
cut into passes and compiled. A kind is what passes were traced for: the modes of modules, autocast,
and who looks at the output. What would make passes do something else than the layers is refused
before any weight has learned from it: shapes that change, draws, hooks, values that code asks for,
attributes that it assigns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import InputError
from penstock.base.telling import Telling
from penstock.engine.model import tree
from penstock.engine.model.replay import autocast_here, autocasting
from penstock.engine.model.spine import NamedLayer
from penstock.engine.stage.backends import Backend
from penstock.engine.stage.conditions import Conditions
from penstock.engine.stage.microbatch_graph import (
    Gradients,
    InputGradients,
    Produced,
    add_gradients,
)
from penstock.engine.stage.pass_compilers import decompositions_for
from penstock.engine.stage.passes import StagePasses, TracedPasses
from penstock.engine.stage.protocol import Criterion, Keep, LossOfTargets
from penstock.engine.stage.stage_function import (
    TENSOR,
    GivenParts,
    Nested,
    StageFunction,
    StageSlots,
    unchanged_attributes,
)
from penstock.engine.tracing.joint import ONE_AT_A_TIME, joint_graph


class PassKind:
    """StagePasses that were traced for one kind of forwards.

    Args:
        stage: its number, for errors.
        function: what was traced.
        traced: its passes.
        given: the parts of what the stage is given.
        tensors: those in them.
        tangents: by the output's tensor, what is like the gradient that comes back for it.

    Attributes:
        traced: as given.
        made: the parts of what the function has given.
    """

    def __init__(
        self,
        stage: int,
        function: StageFunction,
        traced: TracedPasses,
        given: GivenParts,
        tensors: Sequence[Tensor],
        tangents: Mapping[int, Tensor],
    ) -> None:
        self.traced = traced
        self.made = function.made
        self._stage = stage
        self._given = given
        self._expected = [_form(tensor) for tensor in tensors]
        self._strides = [tensor.stride() for tensor in tensors]
        self._tangents = [(place, like) for place, like in tangents.items()]
        stashed = self.made.stashed.values()
        self._ends = [0, *accumulate(part.num_tensors for part in (self.made.output, *stashed))]

    def taken(self, microbatch: int, given: GivenParts, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors that a forward is given, as passes take them.

        Raises:
            InputError: passes were traced for something else.
        """
        if given != self._given:
            raise InputError(
                f"the passes of stage {self._stage} were traced for {self._given}, and microbatch "
                f"{microbatch} has {given}; what is no tensor must stay as it is, or leave "
                "compile=… out"
            )
        for place, (tensor, expected) in enumerate(zip(tensors, self._expected, strict=True)):
            if _form(tensor) != expected:
                raise self._other_form(microbatch, tensors)
            if tensor.stride() != self._strides[place]:
                tensors[place] = _with_strides(tensor, self._strides[place])
        return tensors

    def _other_form(self, microbatch: int, tensors: Sequence[Tensor]) -> InputError:
        was = ", ".join(f"{tuple(shape)} {str(dtype)[6:]}" for shape, dtype, _ in self._expected)
        return InputError(
            f"the passes of stage {self._stage} were compiled for {was}, and microbatch "
            f"{microbatch} has {tree.shapes(list(tensors))}; compiled passes have one shape: give "
            "minibatches of one size, a multiple of the number of microbatches (drop_last=True in "
            "a DataLoader), pad sequences, or leave compile=… out"
        )

    def produced(self, results: Sequence[Tensor], criterion: LossOfTargets | None) -> Produced:
        """What the stage gives; whoever looks at its output has done so."""
        made, ends = self.made, self._ends
        if criterion is not None:
            if criterion.look is not None:
                criterion.look(made.seen.together(results[ends[-1] :]))
            return Produced(results[0], {})
        for tensor, wants in zip(results, made.wants_gradient, strict=False):
            if wants:
                tensor.requires_grad_()
        borders = pairwise(ends[1:])
        stashed = zip(made.stashed.items(), borders, strict=True)
        return Produced(
            made.output.together(results[: ends[1]]),
            {key: part.together(results[start:end]) for (key, part), (start, end) in stashed},
        )

    def coming(
        self, gradients: Gradients, skip_gradients: Mapping[str, Gradients]
    ) -> list[Tensor | None]:
        """Of each result with a gradient, the one that has come back for it."""
        made = self.made
        every = _of_tensors(made.output, gradients)
        for key, part in made.stashed.items():
            own = skip_gradients.get(key)
            every += [None] * part.num_tensors if own is None else _of_tensors(part, own)
        return [every[place] for place, _ in self._tangents]

    def filled(self, coming: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients as passes take them; zeros where none has come back."""
        return [
            torch.zeros_like(like) if own is None else _with_strides(own, like.stride())
            for own, (_, like) in zip(coming, self._tangents, strict=True)
        ]

    def handed_back(self, made: Sequence[Tensor | None]) -> InputGradients:
        """Gradients of what the stage was given, by the leaves of that."""
        given = self._given
        remaining = iter(made)

        def next_of(part: Nested) -> list[Tensor | None]:
            return part.spread(remaining, [None] * len(part.leaves))

        inputs = next_of(given.inputs)
        return InputGradients(inputs, {key: next_of(part) for key, part in given.skips.items()})

    @property
    def num_coming(self) -> int:
        """How many gradients come back."""
        return len(self._tangents)

    @property
    def num_given(self) -> int:
        """How many tensors the stage is given."""
        return len(self._expected)

    @property
    def output_shapes(self) -> list[tuple[int, ...] | None]:
        """Of each leaf of the output that has a gradient, its shape."""
        shapes: dict[int, tuple[int, ...] | None] = dict.fromkeys(range(self._ends[1]))
        for place, like in self._tangents:
            if place in shapes:
                shapes[place] = tuple(like.shape)
        output = self.made.output
        return output.spread(iter(shapes.values()), [None] * len(output.leaves))


def _of_tensors(part: Nested, values: Sequence[Any]) -> list[Any]:
    pairs = zip(part.leaves, values, strict=True)
    return [value for leaf, value in pairs if leaf is TENSOR]


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


class CompiledGraph:
    """All that one microbatch leaves behind until its backward, as ``MicrobatchGraph``; it is its
    own deferral, if the backward is split.

    Args:
        kind: of the forward.
        passes: those that follow it.
        kept: what the forward has left for them.

    Attributes:
        parameters: whose gradients the backward may accumulate.
        deferral: puts off the gradients of weights.
    """

    __slots__ = ("_kept", "_kind", "_missing", "_passes", "deferral", "parameters")

    def __init__(self, kind: PassKind, passes: StagePasses, kept: list[Tensor]) -> None:
        self._kind = kind
        self._passes = passes
        self._kept = kept
        self._missing: set[int] = set()
        self.parameters: Sequence[Tensor] = [slot.now for slot in kind.traced.trained]
        self.deferral = self if passes.weights is not None else None

    def backward(
        self, gradients: Gradients, skip_gradients: Mapping[str, Gradients]
    ) -> InputGradients:
        """Go back once; arguments as for ``MicrobatchGraph.backward``."""
        kind, there = self._kind, self._kept
        self._kept = []
        coming = kind.coming(gradients, skip_gradients)
        self._missing = {place for place, own in enumerate(coming) if own is None}
        if len(self._missing) == len(coming):  # nothing has come back
            return kind.handed_back([None] * kind.num_given)
        with torch.no_grad():
            there += kind.filled(coming)
            made, self._kept = self._passes.back.perform(there)
        made = self._reached(made, 0)
        back = kind.handed_back(made[: kind.num_given])
        if self._passes.weights is None:
            handed = [*coming, *made[: kind.num_given]]
            add_gradients(self.parameters, made[kind.num_given :], handed)
        return back

    def run(self) -> None:
        """Go back to the weights, whose gradients were put off."""
        assert self._passes.weights is not None
        there, self._kept = self._kept, []
        if len(self._missing) == self._kind.num_coming:
            return
        with torch.no_grad():
            made, _ = self._passes.weights.perform(there)
        add_gradients(self.parameters, self._reached(made, self._kind.num_given), ())

    def _reached(self, made: Sequence[Tensor | None], start: int) -> Sequence[Tensor | None]:
        """Without gradients of what nothing has come back for."""
        if not self._missing:
            return made
        depends = self._kind.traced.depends[start:]
        return [
            None if behind <= self._missing else own
            for own, behind in zip(made, depends, strict=False)
        ]

    def held(self) -> list[Tensor]:
        """The tensors that are kept for passes to come."""
        return self._kept

    @property
    def output_shapes(self) -> list[tuple[int, ...] | None]:
        """As of ``MicrobatchGraph``."""
        return self._kind.output_shapes

    def differentiated(self, produced: Produced) -> Iterator[Tensor]:
        """As of ``MicrobatchGraph``."""
        every = tree.tensors([produced.value, *produced.skips.values()])
        if len(every) == 1 and not every[0].requires_grad:  # a loss
            return iter(every)
        return (tensor for tensor in every if tensor.requires_grad)


class CompiledStage:
    """Runs the forwards of a stage by compiled passes.

    Args:
        index: the stage's number.
        layers: of the stage.
        first_layer: index of the first of them in the whole model.
        recompute: whether only each layer's input is kept.
        backend: what compiles.

    Raises:
        ModelError: layers have hooks, which no pass would call.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[NamedLayer],
        first_layer: int,
        backend: Backend,
        *,
        recompute: bool,
    ) -> None:
        every = (module for layer in layers for module in layer.module.modules())
        self._modules = tuple({id(module): module for module in every}.values())
        self._index = index
        self._layers = layers
        self._first_layer = first_layer
        self._recompute = recompute
        self._backend = backend
        self._state = StageSlots(self._modules)
        self._conditions = Conditions(layers)
        self._step = -1
        self._kinds: dict[tuple[Any, ...], PassKind] = {}
        self._conditions.check()

    def forward(
        self,
        microbatch: int,
        step: int,
        inputs: Any,
        skips: Mapping[str, Any],
        criterion: Criterion | None,
        keep: Keep,
    ) -> tuple[Produced, CompiledGraph]:
        """F; arguments as for ``Stage.forward``.

        Raises:
            ModelError: the stage cannot be a compiled pass, or is another one than when it was
                traced.
            InputError: what it is given has another shape than what it was compiled for.
        """
        if step != self._step:
            self._conditions.check()
            self._step = step
        loss = _with_targets(criterion)
        targets = None if loss is None else loss.targets
        tensors, given = GivenParts.apart(inputs, skips, targets)
        kind = self._kind_of(tensors, given, loss, keep)
        tensors = kind.taken(microbatch, given, tensors)
        passes = kind.traced.passes(split=keep is Keep.SPLIT)
        with torch.no_grad():
            if torch.is_autocast_enabled():
                with autocasting({}):  # what is cast is cast by the passes themselves
                    results, kept = passes.forward.perform(tensors)
            else:
                results, kept = passes.forward.perform(tensors)
        return kind.produced(results, loss), CompiledGraph(kind, passes, kept)

    def _kind_of(
        self,
        tensors: list[Tensor],
        given: GivenParts,
        loss: LossOfTargets | None,
        keep: Keep,
    ) -> PassKind:
        key = (
            *(module.training for module in self._modules),
            *(tensor.requires_grad for tensor in tensors),
            loss is None,
            loss is not None and loss.look is not None,
            loss is not None and loss.targets is None,
            *autocast_here().items(),
        )
        kind = self._kinds.get(key)
        if kind is None:
            with ONE_AT_A_TIME, Telling(f"compiling stage {self._index}"):
                kind = self._kinds[key] = self._traced(tensors, given, loss)
                kind.traced.passes(split=keep is Keep.SPLIT)
        return kind

    def _traced(
        self, tensors: list[Tensor], given: GivenParts, loss: LossOfTargets | None
    ) -> PassKind:
        state = self._state
        function = StageFunction(
            self._layers,
            self._first_layer,
            state,
            given,
            None if loss is None else loss.loss,
            looks=loss is not None and loss.look is not None,
            recompute=self._recompute,
        )
        own = [slot.now for slot in (*state.parameters, *state.buffers)]
        wants = [
            tensor.requires_grad and at < len(state.parameters) for at, tensor in enumerate(own)
        ]
        num_inputs = given.inputs.num_tensors
        wants += [tensor.requires_grad and self._first_layer > 0 for tensor in tensors[:num_inputs]]
        wants += [tensor.requires_grad for tensor in tensors[num_inputs:]]
        with unchanged_attributes(self._layers):
            joint = joint_graph(
                function,
                [*own, *tensors],
                wants,
                decompositions_for(self._backend),
                lambda: function.made.wants_gradient,
            )
        self._conditions.check()  # what the trace has changed, every microbatch would
        traced = TracedPasses(joint, state, function.made, self._backend, recompute=self._recompute)
        tangents = {place: node.meta["val"] for place, node in joint.tangents.items()}
        return PassKind(self._index, function, traced, given, tensors, tangents)


def _with_targets(criterion: Criterion | None) -> LossOfTargets | None:
    assert criterion is None or isinstance(criterion, LossOfTargets), criterion
    return criterion
