"""Kernels that torch would choose on a device, in the place of those that it chooses on meta.

On an accelerator, attention and dropout are single kernels that keep little; on meta they fall
apart into their formulas. A CPU has a fused attention of its own. Recurrent layers are few large
kernels on both, on meta thousands of small ones (``recurrences``).

Nor do tensors on meta see autocast: which operations run in which dtype is looked up, with their
casts as kernels of their own. The lists are torch's (its page "Automatic Mixed Precision
package"): of an accelerator, and the shorter one of a CPU. Weights are cast at every use; torch
keeps the casts of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.model import tree
from penstock.engine.model.modes import Args, FunctionMode, Named
from penstock.engine.model.replay import autocast_here
from penstock.training.estimating.recurrences import recurrences

_NARROW = frozenset({
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "addmm", "addmv", "addbmm",
    "baddbmm", "chain_matmul", "multi_dot", "einsum", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "conv_tbc",
    "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell", "prelu",
})  # fmt: skip
_LOSSES = frozenset({
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "ctc_loss",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "poisson_nll_loss",
    "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss", "cdist", "prod", "norm",
})  # fmt: skip
_WIDE_ON_GPU = frozenset({
    "__pow__", "__rpow__", "pow", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1",
    "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "cosine_similarity", "dist",
    "normalize", "pdist", "renorm", "group_norm", "layer_norm", "softmax", "softmin",
    "log_softmax", "softplus", "cumsum", "cumprod", "sum",
})  # fmt: skip


def autocast_dtype(func: Any, dtype: torch.dtype, *, on_gpu: bool) -> torch.dtype | None:
    """The dtype in which autocast runs a function of torch; ``None`` for that of its tensors.

    Args:
        func: a function, a method or an operation.
        dtype: the narrow one that is asked for.
        on_gpu: whose lists hold.
    """
    name = getattr(func, "__name__", "").partition(".")[0]
    if name in _NARROW:
        return dtype
    wide = name in _LOSSES or (on_gpu and name in _WIDE_ON_GPU)
    return torch.float32 if wide else None


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A value with its tensors of floating numbers in another dtype, but those in float64."""
    return tree.replace(
        Tensor,
        lambda tensor: (
            tensor.to(dtype)
            if tensor.is_floating_point() and tensor.dtype != torch.float64
            else tensor
        ),
        value,
    )


_ATTENTIONS = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_DROPOUTS = (F.dropout, torch.dropout, torch.ops.aten.dropout, torch.ops.aten.dropout.default)
_HALVES = (torch.float16, torch.bfloat16)
_ATEN = torch.ops.aten

Attention = Literal["fused", "causal", "formula"]


class AsOnDevice(FunctionMode):
    """While active in a thread, calls choose kernels as on a kind of device.

    Args:
        kind: ``"gpu"`` or ``"cpu"``.
        attention: ``"fused"`` for kernels that keep no scores, ``"causal"`` for those where a dense
            mask stands for the causal one, ``"formula"`` for products and a softmax.

    Attributes:
        saw_recurrence: whether any call was of a recurrent layer.
    """

    def __init__(self, kind: str, attention: Attention) -> None:
        super().__init__()
        self.saw_recurrence = False
        self._is_gpu = kind == "gpu"
        self._is_fused = attention != "formula"
        self._masks_are_causal = attention == "causal"
        self._recurrences = recurrences(on_gpu=self._is_gpu)

    def call(self, func: Any, args: Args, named: Named) -> Any:
        """Run ``func``, or what stands for it."""
        for narrow in autocast_here().values():
            dtype = autocast_dtype(func, narrow, on_gpu=self._is_gpu)
            if dtype is not None:
                args, named = cast(args, dtype), cast(named, dtype)
        substitute: Callable[..., Any] | None = None
        if self._is_fused and func in _ATTENTIONS:
            substitute = self._attention
        elif self._is_gpu and func in _DROPOUTS:
            substitute = _dropout
        elif func in self._recurrences:
            substitute = self._recurrences[func]
            self.saw_recurrence = True
        if substitute is not None:
            result = substitute(*args, **named)
            if result is not None:
                return result
        if isinstance(func, FunctionType) and func.__globals__ is vars(F):
            with self:  # what it calls may have a substitute
                return _without_asking(func)(*args, **named)
        return func(*args, **named)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        if any(tensor.dim() != 4 for tensor in (query, key, value)):
            return None
        if self._masks_are_causal and attn_mask is not None:
            is_whole = attn_mask.shape[-2:] == (query.shape[-2], query.shape[-2])
            if is_whole and key.shape[-2] == query.shape[-2]:
                attn_mask, is_causal = None, True
        if self._is_gpu:
            return _on_gpu(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if dropout_p or enable_gqa or query.shape[-1] != value.shape[-1]:
            return None
        result: Tensor = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=_as_bias(attn_mask, query), scale=scale
        )[0]
        return result


@cache
def _without_asking(func: FunctionType) -> Callable[..., Any]:
    """A function of ``torch.nn.functional`` that does not hand its call to a mode once more."""
    names = {**func.__globals__, **dict.fromkeys(_ASKS, lambda *_: False)}
    copied = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    if mask is None and query.dtype in _HALVES and query.shape[-1] == value.shape[-1]:
        result: Tensor = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout, is_causal, False, scale=scale
        )[0]
        return result
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    bias = _as_bias(mask, query)
    if bias is not None:
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    biased: Tensor = _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout, is_causal, scale=scale
    )[0]
    return biased


def _as_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as fused kernels take it: to be added to scores."""
    return mask.to(query.dtype) if mask is not None and mask.dtype == torch.bool else mask


def _dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> Tensor | None:
    if not (training and train) or not 0 < p < 1 or inplace:
        return None
    result: Tensor = torch.native_dropout(input, p, True)[0]
    return result
