"""Operations of torch as kernels: of which kind, with how many flops, reading and writing what."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from penstock.core.pricing import Kernel, KernelKind
from penstock.engine.model import tree

_BY_NAME: dict[KernelKind, frozenset[str]] = {
    "matmul": frozenset({"mm", "addmm", "addmv", "mv", "_scaled_mm", "_grouped_mm", "dot", "addr"}),
    "batched-matmul": frozenset({"bmm", "baddbmm"}),
    "convolution": frozenset({"convolution", "convolution_backward", "_convolution"}),
    "recurrence": frozenset({"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}),
    "view": frozenset({
        "_unsafe_view", "_reshape_alias", "lift_fresh", "alias", "detach", "empty", "empty_like",
        "new_empty", "new_empty_strided", "empty_strided", "_to_copy_view", "resize_", "set_",
        "_assert_tensor_metadata", "_assert_async", "sym_size",
    }),
    "transcendental": frozenset({
        "sigmoid", "sigmoid_backward", "silu", "silu_backward", "sqrt", "rsqrt", "tanh_backward",
    }),
    "activation": frozenset({
        "tanh", "gelu", "gelu_backward", "exp", "expm1", "erf", "log", "log1p", "pow", "mish",
        "softplus", "softplus_backward", "sin", "cos", "elu", "elu_backward", "logsumexp",
        "log_sigmoid_forward",
    }),
    "random": frozenset({
        "native_dropout", "bernoulli", "bernoulli_", "normal_", "uniform_", "rand_like", "randn",
        "rand", "randn_like", "exponential_", "multinomial", "normal", "log_normal", "poisson",
        "binomial", "cauchy", "geometric", "random", "randint_like", "_fused_dropout",
    }),
    "normalisation": frozenset({
        "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
        "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
        "native_group_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
        "_safe_softmax", "_masked_softmax", "_masked_softmax_backward", "renorm",
        "_weight_norm_interface", "_weight_norm_interface_backward",
    }),
    "batch-norm": frozenset({
        "native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm",
        "cudnn_batch_norm_backward", "_native_batch_norm_legit", "batch_norm_backward",
        "_batch_norm_with_update",
    }),
    "embedding": frozenset({
        "embedding", "embedding_dense_backward", "index_select", "gather", "index", "index_put",
        "index_put_", "_index_put_impl_", "scatter", "scatter_", "scatter_add", "scatter_add_",
        "index_add", "index_add_", "_embedding_bag", "embedding_bag", "gather_backward",
        "_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index", "index_fill", "take", "put",
        "_unsafe_masked_index_put_accumulate", "_embedding_bag_backward", "index_reduce",
        "_embedding_bag_dense_backward", "_embedding_bag_forward_only", "embedding_renorm",
        "masked_scatter", "masked_scatter_backward", "masked_select", "nonzero_static",
        "scatter_reduce", "grid_sampler_2d", "grid_sampler_2d_backward", "grid_sampler_3d",
        "grid_sampler_3d_backward",
    }),
    "copy": frozenset({
        "clone", "copy", "copy_", "_to_copy", "contiguous", "repeat", "flip", "roll", "im2col",
        "col2im",
        "select_scatter", "slice_scatter", "as_strided_scatter", "_foreach_copy_",
        "unfold_backward",
        "reflection_pad2d", "upsample_nearest2d", "upsample_nearest2d_backward",
        "upsample_bilinear2d", "upsample_bilinear2d_backward", "pixel_shuffle", "triu", "tril",
        "diagonal_backward", "repeat_interleave", "rot90", "permute_copy", "channel_shuffle",
        "pixel_unshuffle", "diag_embed", "diagonal_scatter", "complex", "resize_as",
    }),
    "pointwise": frozenset({
        # Those which put whole rows side by side are as fast as additions.
        "cat", "stack", "constant_pad_nd", "select_backward", "slice_backward",
        "abs", "binary_cross_entropy", "binary_cross_entropy_backward",
        "binary_cross_entropy_with_logits", "bucketize", "copysign", "eq", "floor_divide", "ge",
        "glu", "glu_backward", "gt", "hardshrink_backward", "hardsigmoid_backward", "hardswish",
        "hardswish_backward", "hardtanh_backward", "heaviside", "huber_loss",
        "huber_loss_backward", "isin", "le", "leaky_relu_backward", "linalg_cross",
        "log_sigmoid_backward", "lt", "masked_fill", "mse_loss_backward", "ne", "_prelu_kernel",
        "_prelu_kernel_backward", "rrelu_with_noise", "rrelu_with_noise_backward", "rsub",
        "smooth_l1_loss", "smooth_l1_loss_backward", "soft_margin_loss",
        "soft_margin_loss_backward", "softshrink_backward", "threshold", "_masked_scale",
    }),
    "reduction": frozenset({
        "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "var_mean", "std",
        "norm", "linalg_vector_norm", "nll_loss_forward", "nll_loss_backward", "mse_loss",
        "cumsum", "cumprod", "sort", "topk", "any", "all", "nll_loss2d_forward", "count_nonzero",
        "nll_loss2d_backward", "bincount", "argsort", "cummax", "searchsorted", "logcumsumexp",
        "unique_dim", "_foreach_norm", "_aminmax", "cummin", "_cummax_helper", "_cummin_helper",
        "_logcumsumexp", "_is_all_true", "_is_any_true", "histc", "kthvalue", "median",
        "nanmedian", "mode", "trace", "segment_reduce", "_segment_reduce_backward", "_unique2",
        "unique_consecutive",
    }),
}  # fmt: skip
_KINDS = {name: kind for kind, names in _BY_NAME.items() for name in names}
_FILLS = frozenset({
    "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "fill", "fill_", "zero_", "arange", "scalar_tensor", "linspace", "eye", "zero",
})  # fmt: skip
_READS_ROWS = frozenset({
    "embedding", "index_select", "gather", "index", "slice_backward", "select_backward",
})  # fmt: skip
"""Operations that read, of their largest input, no more than they write."""
_MOVES = (
    "upsample_", "_upsample_", "reflection_pad", "replication_pad", "batch_norm_", "_fused_adam",
    "_fused_sgd", "_fused_adagrad", "_amp_",
)  # fmt: skip
"""How names of torch begin that move about what they read and write, and have no tag."""

_DTYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip

_CAUSAL_PLACE = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
}
"""For every fused attention, which argument says that later positions are masked."""


def kernel_of(func: Any, args: Sequence[Any], named: dict[str, Any], result: Any) -> Kernel:
    """An operation as a kernel.

    Args:
        func: of torch, as it was dispatched, with its arguments.
        result: what it gave.
    """
    name = func._schema.name.partition("::")[2]
    inputs, outputs = tree.tensors((args, named)), tree.tensors(result)
    kind = kind_of(func, name, outputs)
    is_backward = "backward" in name or not torch.is_grad_enabled()
    if kind == "view":
        return Kernel(kind, name, "", 0.0, {}, {}, is_backward)
    written = _bytes_by_storage(outputs)
    read = {} if name in _FILLS else _bytes_by_storage(inputs)
    if name in _READS_ROWS:
        most = sum(written.values())
        read = {storage: min(num_bytes, most) for storage, num_bytes in read.items()}
    dtypes = [tensor.dtype for tensor in (*outputs, *inputs) if tensor.is_floating_point()]
    dtype = _DTYPES.get(dtypes[0], "fp32") if dtypes else "fp32"
    flops = _flops(func, name, args, named, result)
    if kind == "convolution" and args[7 if name == "convolution_backward" else 6]:
        kind = "transposed-convolution"
    padding = 1.0
    if "convolution" in kind:
        padding = padding_of(*args[2 if name == "convolution_backward" else 1].shape[:2])
    return Kernel(kind, name, dtype, flops, read, written, is_backward, padding)


_CHANNELS = 16
"""Convolutions compute channels by so many at a time."""

_COLOURS = 4
"""Of pictures, which have so few channels, they compute half as many."""


def padding_of(made: int, given: int) -> float:
    """How many times its flops a convolution between so many channels computes."""
    if given == 1:  # of each channel alone, for which libraries have kernels of their own
        return 1.0
    at_a_time = _CHANNELS // 2 if given <= _COLOURS else _CHANNELS
    return _filled_up(made, _CHANNELS) * _filled_up(given, at_a_time)


def _filled_up(count: int, at_a_time: int) -> float:
    return math.ceil(count / at_a_time) * at_a_time / count


def kind_of(func: Any, name: str, outputs: Sequence[Tensor]) -> KernelKind:
    """The class of kernels to which an operation belongs; ``unknown`` for one that nobody knows."""
    base = name.removesuffix("_") if not name.startswith("_") else name
    known = _KINDS.get(name) or _KINDS.get(base)
    if name in _CAUSAL_PLACE:
        known = "attention"
    elif known is None and func._overloadpacket in flop_registry:
        known = "matmul"
    elif known is None and (func.is_view or not outputs):
        known = "view"
    elif known in _PRODUCTS and _formula(func, name) is None:
        known = "unknown"
    return known or _kind_by_tags(func, name, base)


def _kind_by_tags(func: Any, name: str, base: str) -> KernelKind:
    if "pool" in name:
        return "pooling"
    if torch.Tag.reduction in func.tags:
        return "reduction"
    if torch.Tag.pointwise in func.tags or base in _FILLS or name.startswith("_foreach"):
        return "pointwise"
    moves = base.startswith((*_MOVES, "new_")) or "like" in base
    return "pointwise" if func.namespace == "aten" and moves else "unknown"


def _grouped_flops(rows: Tensor, weights: Tensor, *_: Any, **__: Any) -> float:
    """Of the products of a mixture's experts; where only one side is stacked, offsets share the
    other out, so that each of its rows is multiplied once."""
    groups = rows.shape[0] if rows.dim() == weights.dim() == 3 else 1
    return 2.0 * groups * rows.shape[-2] * rows.shape[-1] * weights.shape[-1]


def _recurrence_flops(value: Tensor, own: Tensor, recurrent: Tensor) -> float:
    return 2.0 * value.shape[0] * value.shape[1] * (own.numel() + recurrent.numel())


_PRODUCTS = frozenset({"matmul", "batched-matmul", "convolution"})
_FLOPS: dict[str, Callable[..., float]] = {
    "_grouped_mm": _grouped_flops,
    "mv": lambda matrix, *_, **__: 2.0 * matrix.numel(),
    "addmv": lambda _, matrix, *__, **___: 2.0 * matrix.numel(),
    "dot": lambda first, *_, **__: 2.0 * first.numel(),
    "addr": lambda _, first, second, **__: 2.0 * first.numel() * second.numel(),
    "mkldnn_rnn_layer": lambda *args, **_: _recurrence_flops(*args[:3]),
    "mkldnn_rnn_layer_backward": lambda *args, **_: 2 * _recurrence_flops(*args[:3]),
}
"""Of products for which torch registers no formula."""


def _formula(func: Any, name: str) -> Callable[..., float] | None:
    formula: Callable[..., float] | None = flop_registry.get(func._overloadpacket)
    return formula or _FLOPS.get(name.removesuffix("_"))


def _flops(func: Any, name: str, args: Sequence[Any], named: dict[str, Any], result: Any) -> float:
    if name in _CAUSAL_PLACE:
        return _attention_flops(name, args, named)
    formula = _formula(func, name)
    if formula is None:
        return 0.0
    flops: float = formula(*args, **named, out_val=result)
    return flops


_CPU_COLUMNS = 512
"""Columns of a block of the scores that torch's fused attention on CPUs computes at once."""


def _attention_flops(name: str, args: Sequence[Any], named: dict[str, Any]) -> float:
    is_backward = name.endswith("backward")
    query, key, value = args[1:4] if is_backward else args[:3]
    place = _CAUSAL_PLACE[name]
    is_causal = named.get("is_causal", args[place] if len(args) > place else False)
    batch, heads, rows, width = query.shape
    columns = key.shape[-2]
    share = 0.5 if is_causal else 1.0
    if is_causal and "for_cpu" in name:  # it leaves out whole blocks of columns only
        share = min(1.0, 0.5 + 0.5 * _CPU_COLUMNS / columns)
    pairs = 2.0 * batch * heads * rows * columns * share
    # Forward: scores and values. Backward: scores again, and two products for each of them.
    products: int = 3 * width + 2 * value.shape[-1] if is_backward else width + value.shape[-1]
    flops: float = pairs * products
    return flops


def _bytes_by_storage(tensors: Sequence[Tensor]) -> dict[int, int]:
    """What is touched of each storage: a view less than all of it, what is expanded no more."""
    touched: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        num_bytes = min(tensor.numel() * tensor.element_size(), storage.nbytes())
        touched[storage._cdata] = max(touched.get(storage._cdata, 0), num_bytes)
    return touched
