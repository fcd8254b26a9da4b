"""The operations whose weight gradients can be computed later, and their formulas.

Every formula is the one that autograd uses, in the same order of summation, so its results are
equal to the bit. What is not described here is not deferred: weights that are computed (weight
norm, pruning, slices), frozen ones, tensor subclasses, sparse gradients, unbatched convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.device.crossing import PLAIN_TENSORS


class Formula(Protocol):
    """From the output's gradient and the input to the gradients of the parameters."""

    def __call__(
        self, gradient: Tensor, given: Tensor, *, into: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The gradients.

        Args:
            into: memory for the first of them, in which it then is if the formula can write it
                anywhere.
        """


class Deferrable(NamedTuple):
    """A call whose weight gradients can be deferred.

    Attributes:
        input: what is neither weight nor bias.
        parameters: which gradients the formula gives.
        run: the call itself, of the input, with detached parameters.
        formula: gives the deferred part.
    """

    input: Tensor
    parameters: tuple[Tensor, ...]
    run: Callable[[Tensor], Tensor]
    formula: Formula

    def cast(self, given: Tensor) -> Tensor:
        """The input as autocast would cast it, so that what is kept is what was used."""
        kind = given.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return given
        eligible = given.is_floating_point() and given.dtype is not torch.float64
        return given.to(torch.get_autocast_dtype(kind)) if eligible else given


def split_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Deferrable | None:
    """How to defer a call, or ``None`` if it cannot be."""
    describe = _DESCRIBED.get(func)
    if describe is None or torch._C._are_functorch_transforms_active():
        return None
    split = describe(*args, **kwargs)
    if split is None or type(split.input) not in PLAIN_TENSORS:
        return None
    return split


def _trained(tensor: Tensor) -> bool:
    """Whether it is an ordinary leaf that gets a gradient."""
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.requires_grad
        and tensor.is_leaf
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
    )


def _parameters(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...] | None:
    """Those that get gradients; ``None`` if one of them cannot be deferred."""
    if not _trained(weight):
        return None
    if bias is None or not bias.requires_grad:
        return (weight,)
    return (weight, bias) if _trained(bias) else None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Deferrable | None:
    parameters = _parameters(weight, bias)
    if parameters is None:
        return None
    return Deferrable(
        input,
        parameters,
        partial(_run_linear, weight.detach(), None if bias is None else bias.detach()),
        partial(_linear_gradients, [parameter.dtype for parameter in parameters]),
    )


def _run_linear(weight: Tensor, bias: Tensor | None, given: Tensor) -> Tensor:
    if given.dim() < 3 or (bias is not None and given.is_contiguous()):
        return F.linear(given, weight, bias)
    # torch folds rows into one product if the weight needs a gradient, and else sometimes not.
    folded = F.linear(given.reshape(-1, given.shape[-1]), weight)
    output = folded.view(*given.shape[:-1], weight.shape[0])
    return output if bias is None else output.add(bias.to(output.dtype))


def _linear_gradients(
    dtypes: Sequence[torch.dtype], gradient: Tensor, given: Tensor, *, into: Tensor | None = None
) -> tuple[Tensor, ...]:
    if gradient.dim() != 2:
        gradient = gradient.reshape(-1, gradient.shape[-1])
        given = given.reshape(-1, given.shape[-1])
    fits = into is not None and into.dtype is gradient.dtype and into.is_contiguous()
    weight = torch.mm(gradient.t(), given, out=into if fits else None)
    if weight.dtype is not dtypes[0]:
        weight = weight.to(dtypes[0])
    return (weight,) if len(dtypes) == 1 else (weight, gradient.sum(0).to(dtypes[1]))


def _convolution(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Deferrable | None:
    steps = _along(dimensions, dilation)
    if padding == "same":
        total = [step * (size - 1) for step, size in zip(steps, weight.shape[2:], strict=True)]
        if any(extra % 2 for extra in total):
            return None  # torch pads the input by itself first
        padding = [extra // 2 for extra in total]
    pads = _along(dimensions, 0 if padding == "valid" else padding)
    shape = (_along(dimensions, stride), pads, steps, False, [0] * dimensions, groups)
    return _any_convolution(input, weight, bias, shape)


def _transposed_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **named: Any
) -> Deferrable | None:
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    given = {**dict(zip(names, more, strict=False)), **named}
    stride, padding, output_padding, dilation = (
        _along(weight.dim() - 2, given.get(name, default))
        for name, default in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))
    )
    shape = (stride, padding, dilation, True, output_padding, given.get("groups", 1))
    return _any_convolution(input, weight, bias, shape)


def _along(dimensions: int, value: Any) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dimensions if len(numbers) == 1 else numbers


def _any_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[Any, ...]
) -> Deferrable | None:
    parameters = _parameters(weight, bias)
    if parameters is None or input.dim() != weight.dim():
        return None
    return Deferrable(
        input,
        parameters,
        partial(_run_convolution, weight.detach(), None if bias is None else bias.detach(), shape),
        partial(_convolution_gradients, parameters, shape),
    )


def _run_convolution(
    weight: Tensor, bias: Tensor | None, shape: tuple[Any, ...], given: Tensor
) -> Tensor:
    cast_bias = None if bias is None else bias.to(given.dtype)
    return torch.convolution(given, weight.to(given.dtype), cast_bias, *shape)


def _convolution_gradients(
    parameters: tuple[Tensor, ...],
    shape: tuple[Any, ...],
    gradient: Tensor,
    given: Tensor,
    *,
    into: Tensor | None = None,
) -> tuple[Tensor, ...]:
    weight, biases = parameters[0], [list(bias.shape) for bias in parameters[1:]]
    _, *gradients = torch.ops.aten.convolution_backward(
        gradient,
        given,
        weight.detach().to(gradient.dtype),
        biases[0] if biases else None,
        *shape,
        [False, True, bool(biases)],
    )
    pairs = zip(parameters, gradients, strict=False)
    return tuple(each.to(parameter.dtype) for parameter, each in pairs)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Deferrable | None:
    if not _trained(weight) or max_norm is not None or sparse:
        return None
    fixed, num_rows = weight.detach(), weight.shape[0]
    ignored = -1 if padding_idx is None else padding_idx % weight.shape[0]

    def gradients(
        gradient: Tensor, given: Tensor, *, into: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        weight_gradient: Tensor = torch.ops.aten.embedding_backward(
            gradient, given, num_rows, ignored, scale_grad_by_freq, False
        )
        return (weight_gradient,)

    return Deferrable(
        input, (weight,), lambda given: F.embedding(given, fixed, padding_idx), gradients
    )


_DESCRIBED: Mapping[Any, Callable[..., Deferrable | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.conv1d: partial(_convolution, 1),
    F.conv2d: partial(_convolution, 2),
    F.conv3d: partial(_convolution, 3),
    F.conv_transpose1d: _transposed_convolution,
    F.conv_transpose2d: _transposed_convolution,
    F.conv_transpose3d: _transposed_convolution,
}
