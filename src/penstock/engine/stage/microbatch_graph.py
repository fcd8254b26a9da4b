"""The autograd graph of one microbatch on one stage, cut off at the stage's borders.

Inputs come in detached and leave their gradients in leaves of their own; of the outputs only the
graph edge is kept, which is all that a backward needs. Whether what a stage makes is finite is
looked at before any weight learns from it.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.autograd.variable import Variable

from penstock.base.errors import InputError
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.model import tree
from penstock.engine.model.randomness import NoDraws
from penstock.engine.stage.deferral import Deferral, accumulate

_engine = Variable._execution_engine

Gradients = Sequence[Tensor | None]
"""One per leaf of a value, ``None`` where nothing flows back."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
"""Classes of values that may pass between stages beside tensors: they can hold none."""


class Produced(NamedTuple):
    """The results of a forward, detached.

    Attributes:
        value: the output, or the loss if there is a criterion.
        skips: what layers stashed for later stages, by key.
    """

    value: Any
    skips: dict[str, Any]


class InputGradients(NamedTuple):
    """The results of a backward; ``None`` where there is no gradient.

    Attributes:
        inputs: one per leaf of the input.
        skips: one per leaf, by key, of every skip that came from another stage.
    """

    inputs: list[Tensor | None]
    skips: dict[str, list[Tensor | None]]


@dataclass(slots=True)
class MicrobatchGraph:
    """All that one microbatch leaves behind until its backward.

    Attributes:
        inputs: leaves of the input, where gradients will be.
        recalled: likewise, of the skips that came from earlier stages.
        outputs: edges of the output's leaves.
        stashed: likewise, of the skips that went to later stages.
        drew: whether a layer drew random numbers.
        deferral: where weight gradients wait, if the backward is split.
        parameters: whose gradients the backward may accumulate.
    """

    inputs: list[Any]
    recalled: Mapping[str, list[Any]]
    outputs: list[GradientEdge | None]
    stashed: Mapping[str, list[GradientEdge | None]]
    drew: bool
    deferral: Deferral | None
    parameters: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        inputs: list[Any],
        recalled: Mapping[str, list[Any]],
        output: Any,
        stashed: Mapping[str, Any],
        drew: bool,
        deferral: Deferral | None,
        parameters: Callable[[], Sequence[Tensor]],
    ) -> Self:
        """The graph that a forward has left.

        Args:
            output: of the last layer.
            stashed: the skips that went to later stages, by key.
            parameters: gives those whose gradients the backward may accumulate.

        Raises:
            InputError: a layer took gradients in the forward that are to be put off.
        """
        if deferral is not None:
            deferral.check_forward()
        outputs, edges_of = edges(output), stashed
        if stashed:  # mostly nothing is
            edges_of = {key: edges(skip) for key, skip in stashed.items()}
        own = parameters() if torch.is_grad_enabled() else ()
        return cls(inputs, recalled, outputs, edges_of, drew, deferral, own)

    def backward(
        self, gradients: Gradients, skip_gradients: Mapping[str, Gradients]
    ) -> InputGradients:
        """Go back once; what is not deferred accumulates in ``.grad`` of the parameters.

        Args:
            gradients: of the output's leaves.
            skip_gradients: of the leaves of skips, by key; those of the last reader first.

        Raises:
            InputError: a gradient belongs to a skip that the stage did not stash.
        """
        ends, given = self.outputs, gradients
        if skip_gradients:
            ends, given = self._with_skips(gradients, skip_gradients)
        starts: list[GradientEdge] = []
        seeds: list[Tensor] = []
        for edge, gradient in zip(ends, given, strict=True):
            if edge is not None and gradient is not None:
                starts.append(edge)
                seeds.append(gradient)
        first = [parameter for parameter in self.parameters if parameter.grad is None]
        if starts:
            self._go_back(starts, seeds)
        result = InputGradients(
            _gradients(self.inputs),
            {key: _gradients(leaves) for key, leaves in self.recalled.items()}
            if self.recalled
            else {},
        )
        if first:
            handed = [gradients, *skip_gradients.values(), result.inputs, *result.skips.values()]
            _keep_apart(first, [tensor for those in handed for tensor in those])
        return result

    @property
    def output_shapes(self) -> list[tuple[int, ...] | None]:
        """The shape of each leaf of the output that has a gradient."""
        return [
            None if edge is None else tuple(edge.node._input_metadata[edge.output_nr].shape)
            for edge in self.outputs
        ]

    def differentiated(self, produced: Produced) -> Iterator[Tensor]:
        """The tensors of what the forward has produced through which gradients come back."""
        pairs = [(self.outputs, produced.value)]
        pairs += [(ends, produced.skips[key]) for key, ends in self.stashed.items()]
        for ends, value in pairs:
            for edge, leaf in zip(ends, tree.flatten(value)[0], strict=True):
                if edge is not None:
                    yield leaf

    def held(self) -> list[Tensor]:
        """The tensors that are kept outside of autograd's graph."""
        return tree.tensors([self.inputs, self.recalled])

    def _with_skips(
        self, gradients: Gradients, skip_gradients: Mapping[str, Gradients]
    ) -> tuple[list[GradientEdge | None], list[Tensor | None]]:
        """All edges to go back from and their gradients, those of skips first.

        One value may have left as several skips and as the output. autograd sums in this order, and
        without a cut it would sum from the last reader to the first, which is the next layer.
        """
        unknown = sorted(skip_gradients.keys() - self.stashed.keys())
        if unknown:
            raise InputError(
                f"there are gradients of the skips {unknown}, but the forward gave "
                f"{sorted(self.stashed)}"
            )
        ends: list[GradientEdge | None] = []
        given: list[Tensor | None] = []
        for key, those in skip_gradients.items():
            for edge, gradient in zip(self.stashed[key], those, strict=True):
                ends.append(edge)
                given.append(gradient)
        return [*ends, *self.outputs], [*given, *gradients]

    def _go_back(self, starts: Sequence[GradientEdge], seeds: Sequence[Tensor]) -> None:
        if self.deferral is None and not self.drew:
            _run_backward(starts, seeds)
            return
        with NoDraws() if self.drew else nullcontext(), self.deferral or nullcontext():
            _run_backward(starts, seeds)
        if self.deferral is not None:
            self.deferral.settle()


def _run_backward(starts: Sequence[GradientEdge], seeds: Sequence[Tensor]) -> None:
    """As ``torch.autograd.backward``, which calls the same after checks in Python that take as long
    as the backward of a small layer; the engine makes them again."""
    # For threads of accelerators torch copies a context, too, where what compiles there looks how.
    run = _engine.run_backward if seeds[0].is_cpu else _engine_run_backward
    run(
        tuple(starts),
        tuple(seeds),
        False,  # the graph is not kept
        False,  # and no graph of the gradients is made
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def cut(value: Any, wants_gradient: bool) -> tuple[list[Any], Any]:
    """(the leaves where gradients will be, the value to compute with)."""
    leaves, structure = tree.flatten(value)
    pairs = [tree.cut(leaf, wants_gradient) for leaf in leaves]
    return [pair[0] for pair in pairs], tree.unflatten([pair[1] for pair in pairs], structure)


def edges(value: Any) -> list[GradientEdge | None]:
    """Where the graph of each leaf ends; ``None`` for what has no gradient, which is everything
    while gradients are off: views of parameters still say then that they require some."""
    if type(value) is Tensor and value.requires_grad and torch.is_grad_enabled():
        return [get_gradient_edge(value)]
    leaves = tree.flatten(value)[0]
    if not torch.is_grad_enabled():
        return [None] * len(leaves)
    return [
        get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
        for leaf in leaves
    ]


def sent(value: Any, stage: int) -> Any:
    """A value as it leaves a stage: without its graph, and the same leaves want a gradient; none
    while gradients are off: views of parameters still say then that they require some.

    Raises:
        InputError: a leaf is an object that may hold tensors.
    """
    leaves, structure = tree.flatten(value)
    return tree.unflatten([_sent_leaf(leaf, stage) for leaf in leaves], structure)


def _sent_leaf(output: Any, stage: int) -> Any:
    if isinstance(output, Tensor):
        return tree.apart(output) if torch.is_grad_enabled() else output.detach()
    if isinstance(output, _PLAIN):
        return output
    raise InputError(
        f"stage {stage} returned a {type(output).__name__}, whose tensors (if any) cannot be seen; "
        "return tensors nested in tuples, lists and dicts, or register the class with "
        "torch.utils._pytree"
    )


def scalar(loss: Any, training: bool) -> Tensor:
    """A loss as a tensor without dimensions.

    Raises:
        InputError: it is no number, or is to be trained on and has no gradient.
    """
    if isinstance(loss, int | float):
        raise InputError(
            f"the loss is a plain {type(loss).__name__}, which has no gradient; let the loss "
            "function give a tensor, without .item() or float(…)"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            f"the loss must be one number, but it has {given}; reduce it to a "
            'scalar, as reduction="mean" or .mean() does'
        )
    if training and not loss.requires_grad:
        raise InputError(
            "the loss has no gradient: it was detached or depends on no trained parameter; compute "
            "it from the output with differentiable operations"
        )
    return loss.reshape(()) if loss.dim() else loss


class TrainedParameters:
    """The trained parameters that modules hold: the model's, or what stands in their place, all of
    them at once.

    They are looked for where a minibatch begins, and where others have come in their place: between
    two microbatches that takes longer than anything else that is no kernel.

    Args:
        modules: each alone, not those inside.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables = [module._parameters for module in modules]
        self._first: tuple[Mapping[str, Tensor | None], str] = {}, ""
        self._held: list[Tensor] = []

    def __call__(self) -> Sequence[Tensor]:
        """Those that the modules hold now."""
        table, name = self._first
        # By these, since the parameters of torch.jit's modules are no dict.
        if not self._held or name not in table or table[name] is not self._held[0]:
            held = [
                (table, name, parameter)
                for table in self._tables
                for name, parameter in table.items()
                if parameter is not None and parameter.requires_grad
            ]
            self._first = held[0][:2] if held else ({}, "")
            self._held = [parameter for *_, parameter in held]
        return self._held

    def forget(self) -> None:
        """Between minibatches, some may be frozen, and others trained."""
        self._held = []


def _gradients(leaves: list[Any]) -> list[Tensor | None]:
    return [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves]


def _keep_apart(parameters: Iterable[Tensor], handed: Iterable[Tensor | None]) -> None:
    """Give first gradients of parameters memory of their own.

    autograd adopts a first gradient, even a view of what it also hands on as another one
    (``v + self.p.view(-1)``), and adds those of later microbatches in place. A stage that still
    needs what was handed on would read a sum.
    """
    addresses = {_address(tensor) for tensor in handed if tensor is not None} - {None}
    for parameter in parameters:
        if parameter.grad is not None and _address(parameter.grad) in addresses:
            parameter.grad = parameter.grad.clone()


def add_gradients(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    handed: Iterable[Tensor | None],
) -> None:
    """Add gradients to ``.grad`` of parameters, as autograd does.

    Args:
        gradients: one for each parameter; nobody else keeps them, but for ``handed``.
        handed: gradients that others have been given, or are given.
    """
    totals: list[Tensor] = []
    added: list[Tensor] = []
    others: list[tuple[Tensor, Tensor]] = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        total = parameter.grad
        if total is None or parameter._post_accumulate_grad_hooks or parameter._backward_hooks:
            others.append((parameter, gradient))
        else:
            totals.append(total)
            added.append(gradient)
    with torch.no_grad():
        if totals:
            torch._foreach_add_(totals, added)
        if others:
            met = {_address(tensor) for tensor in handed if tensor is not None}
            for parameter, gradient in others:
                accumulate(parameter, gradient, owned=_address(gradient) not in met)
                met.add(_address(gradient))


def _address(tensor: Tensor) -> int | None:
    """The address of its memory, if it has some that others may share."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


NOT_FINITE_REMEDY = "Lower the learning rate, clip gradients, or look at this minibatch"


class NotFinite(ArithmeticError):
    """A value or a gradient is infinite, or not a number.

    Args:
        microbatch: the one whose graph it has come through.
        name: what it is.
        value: the number that it has.
    """

    def __init__(self, microbatch: int, name: str, value: complex) -> None:
        super().__init__(
            f"{name} is {value}; nothing has been learned through it. {NOT_FINITE_REMEDY}; what is "
            "meant to be infinite, such as a mask, is given without requires_grad, or with "
            "stop_at_nan=False"
        )
        self.microbatch = microbatch


def check_finite(
    microbatch: int,
    name: str,
    tensors: Iterable[Tensor | None],
    gradients: Sequence[Tensor] = (),
) -> None:
    """Look at tensors in main memory; on an accelerator the host would have to wait for them.

    Args:
        microbatch, name: as for ``NotFinite``.
        tensors: what nobody may write.
        gradients: those of weights, whose memory is their own.

    Raises:
        NotFinite: one of them holds what is infinite or not a number.
    """
    for tensor in chain(() if _are_finite(gradients) else gradients, tensors):
        if tensor is not None and (value := _not_finite(tensor.detach())) is not None:
            raise NotFinite(microbatch, name, value)


def _are_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether one call for all tells so, which takes a tenth of the time of a call for each; it is
    the one with which gradients are unscaled, so it writes them, here as they are."""
    plain = all(
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and gradient.is_contiguous()
        and gradient.is_floating_point()
        and not gradient.requires_grad
        for gradient in gradients
    )
    if not plain or not gradients:
        return False
    overflow, unscaled = (torch.full((), n, dtype=torch.float32, device="cpu") for n in (0.0, 1.0))
    torch._amp_foreach_non_finite_check_and_unscale_([*gradients], overflow, unscaled)
    return not overflow.item()


def _not_finite(tensor: Tensor) -> complex | None:
    """The first number in a tensor that is not finite."""
    has_some = tensor.is_floating_point() or tensor.is_complex()
    if not has_some or not is_on_host(tensor.device):
        return None
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor
    # A sum is read off in one pass; of large numbers it may be infinite, and they are not. Asking
    # torch whether it is finite takes longer than the sum.
    if cmath.isfinite(values.sum().item()):
        return None
    wrong = values[~values.isfinite()]
    return wrong[0].item() if wrong.numel() else None
