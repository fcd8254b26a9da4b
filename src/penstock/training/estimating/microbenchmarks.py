"""The calls by which a CPU is described: of every kind of kernel several sizes, forward and
backward, with operands that are as far away as those of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.training.estimating.operations import padding_of
from penstock.training.estimating.recurrences import Onednn

_FLOAT = 4
_WORDS = (2**10, 2**13, 2**15, 2**17, 2**19, 2**21, 2**23)
_COLD_BYTES = 2**25
_MOST_OPERANDS = 64
"""In a model, most operands of a call were last touched long before: calls take turns with as many
sets of operands as no near cache holds, or with so many small ones."""
_FEW_ROWS = 8
COMPUTING = frozenset({
    "matmul", "batched-matmul", "attention", "attention-backward", "convolution",
    "convolution-backward", "transposed-convolution", "transposed-convolution-backward",
    "recurrence", "recurrence-backward",
})  # fmt: skip
"""Kinds whose work is flops; that of others is bytes."""


class Point(NamedTuple):
    """A call to be timed.

    Attributes:
        kind: of kernel; with ``-backward`` for those of a backward.
        work: flops or bytes of the call.
        call: takes operands.
        operands: makes a set of them.
    """

    kind: str
    work: float
    call: Callable[..., object]
    operands: Callable[[], tuple[Tensor, ...]]

    def in_turns(self) -> Callable[[], object]:
        """The call, each time with the next set of operands."""
        first = self.operands()
        num_bytes = sum(tensor.nbytes for tensor in first)
        count = min(_MOST_OPERANDS, max(1, _COLD_BYTES // num_bytes))
        call, sets = self.call, cycle([first, *(self.operands() for _ in range(count - 1))])
        return lambda: call(*next(sets))


def all_points() -> Iterator[Point]:
    """Every call that is timed."""
    yield from _products()
    yield from _convolutions()
    if torch._C._has_mkldnn:  # whose recurrences they are
        yield from _recurrences()
    yield from _moving()


def _products() -> Iterator[Point]:
    sizes = (
        (4, 16, 16), (16, 64, 64), (32, 128, 128), (64, 128, 384), (128, 192, 576),
        (128, 256, 1024), (256, 512, 1024), (512, 1024, 1024), (1024, 1024, 2048),
    )  # fmt: skip
    for rows, inner, columns in sizes:
        flops = 2.0 * rows * inner * columns
        yield Point("matmul", flops, _linear, _tensors((columns,), (rows, inner), (columns, inner)))
    batches = (
        (2, 16, 16, 16), (8, 32, 32, 32), (16, 64, 32, 64), (8, 32, 128, 256), (32, 128, 32, 128),
        (16, 256, 64, 256),
    )  # fmt: skip
    for count, rows, inner, columns in batches:
        flops = 2.0 * count * rows * inner * columns
        operands = _tensors((count, rows, inner), (count, inner, columns))
        yield Point("batched-matmul", flops, torch.bmm, operands)
    for count, tokens, width in (
        (1, 16, 16),
        (4, 64, 32),
        (8, 128, 32),
        (24, 128, 32),
        (8, 256, 64),
    ):
        shape = (1, count, tokens, width)
        flops = 4.0 * count * tokens * tokens * width
        yield Point(
            "attention", flops, F.scaled_dot_product_attention, _tensors(shape, shape, shape)
        )
        yield Point(
            "attention-backward", 2.5 * flops, _attention_backward,
            partial(_attended, *_tensors(shape, shape, shape, shape)()),
        )  # fmt: skip


def _tensors(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def _linear(bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(bias, rows, weight.t())


def _linear_backward(rows: Tensor, gradient: Tensor, weight: Tensor) -> object:
    return gradient @ weight, gradient.t() @ rows


def _attended(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    taken = [tensor.clone() for tensor in (query, key, value)]
    made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*taken)
    return gradient.clone(), *taken, *made


def _attention_backward(*operands: Tensor) -> object:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *operands, 0.0, False
    )


def _convolutions() -> Iterator[Point]:
    for rows, given, made, side in (
        (1, 3, 16, 16), (4, 3, 32, 32), (8, 32, 64, 16), (8, 48, 48, 32), (8, 64, 128, 32),
    ):  # fmt: skip
        flops = 2.0 * rows * given * made * side * side * 9 * padding_of(made, given)
        shapes = (rows, given, side, side), (made, given, 3, 3), (rows, made, side, side)
        yield Point("convolution", flops, partial(F.conv2d, padding=1), _tensors(*shapes[:2]))
        yield Point("convolution-backward", 2 * flops, _convolution_backward, _tensors(*shapes))

        shapes = (rows, given, side, side), (given, made, 2, 2), (rows, made, 2 * side, 2 * side)
        flops *= 4 / 9
        widen = partial(F.conv_transpose2d, stride=2)
        kind = "transposed-convolution"
        yield Point(kind, flops, widen, _tensors(*shapes[:2], (made,)))
        yield Point(f"{kind}-backward", 2 * flops, _transposed_backward, _tensors(*shapes))


def _transposed_backward(value: Tensor, weight: Tensor, gradient: Tensor) -> object:
    return torch.ops.aten.convolution_backward(
        gradient, value, weight, [weight.shape[1]], [2, 2], [0, 0], [1, 1], True, [0, 0], 1,
        [True, True, True],
    )  # fmt: skip


def _convolution_backward(value: Tensor, weight: Tensor, gradient: Tensor) -> object:
    return torch.ops.aten.convolution_backward(
        gradient, value, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )


def _recurrences() -> Iterator[Point]:
    for steps, rows, width in ((4, 1, 16), (8, 4, 32), (16, 4, 64), (32, 8, 128), (32, 16, 256)):
        flops = 16.0 * steps * rows * width**2
        shapes = (steps, rows, width), *[(4 * width, width)] * 2, *[(4 * width,)] * 2
        state = (1, rows, width)
        yield Point("recurrence", flops, _recurrence, _tensors(*shapes, state, state))
        kept = partial(_unrolled, _tensors(*shapes, state, state))
        yield Point(
            "recurrence-backward", 2 * flops,
            lambda *own: Onednn(own[:-4]).backward(*own[-4:]), kept,
        )  # fmt: skip


def _recurrence(*operands: Tensor) -> tuple[Tensor, ...]:
    return Onednn(operands).forward()


def _unrolled(make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    operands = make()
    with torch.enable_grad():  # else it makes no workspace for a backward
        return *operands, *_recurrence(*operands)


def _moving() -> Iterator[Point]:
    for words in _WORDS:
        flat, square = _tensors((words,)), _tensors((words // 64, 64))
        num_bytes = float(_FLOAT * words)
        yield Point("pointwise", 3 * num_bytes, torch.add, _tensors((words,), (words,)))
        yield Point("transcendental", 2 * num_bytes, torch.sigmoid, flat)
        yield Point("activation", 2 * num_bytes, F.gelu, flat)
        pair = _tensors((words,), (words,))
        yield Point("activation-backward", 3 * num_bytes, torch.ops.aten.gelu_backward, pair)
        yield Point("random", 2 * num_bytes, lambda x: x.bernoulli_(0.9), flat)
        yield Point("normalisation", 2 * num_bytes, partial(F.softmax, dim=-1), square)
        yield Point("reduction", num_bytes, partial(torch.sum, dim=0), square)
        yield Point("copy", 2 * num_bytes, lambda x: x.t().contiguous(), square)
        yield Point("embedding", 2 * num_bytes, F.embedding, partial(_looked_up, words // 64))
        picture = _tensors((words // 1024, 4, 16, 16))
        yield Point("pooling", 1.75 * num_bytes, partial(F.max_pool2d, kernel_size=2), picture)
        yield Point("pooling-backward", 2.75 * num_bytes, _pooling_backward, _pooled(picture))
        yield Point(
            "batch-norm", 2 * num_bytes,
            lambda x: F.batch_norm(x, None, None, *_channels(x), training=True), picture,
        )  # fmt: skip
        pair = _tensors(*[(words // 1024, 4, 16, 16)] * 2)
        yield Point("batch-norm-backward", 3 * num_bytes, _batch_norm_backward, pair)
    for width in (64, 256, 512, 1024, 2048):
        num_bytes = float(_FLOAT * width * (width + 2 * _FEW_ROWS))
        few, whole = (_FEW_ROWS, width), (width, width)
        yield Point("few-rows", num_bytes, _linear, _tensors((width,), few, whole))
        yield Point("few-rows-backward", 2 * num_bytes, _linear_backward, _tensors(few, few, whole))


def _looked_up(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, count, (count,)), torch.randn(count, 64)


def _pooled(picture: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    def operands() -> tuple[Tensor, ...]:
        (value,) = picture()
        made, places = F.max_pool2d(value, 2, return_indices=True)
        return made, value, places

    return operands


def _pooling_backward(gradient: Tensor, value: Tensor, places: Tensor) -> object:
    return torch.ops.aten.max_pool2d_with_indices_backward(
        gradient, value, [2, 2], [2, 2], [0, 0], [1, 1], False, places
    )


def _batch_norm_backward(gradient: Tensor, picture: Tensor) -> object:
    weight, mean = _channels(picture)
    return torch.ops.aten.native_batch_norm_backward(
        gradient, picture, weight, None, None, mean, weight, True, 1e-5, [True, True, True]
    )


def _channels(picture: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(picture.shape[1]), torch.zeros(picture.shape[1])
