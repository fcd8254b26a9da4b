"""Autocast as tensors on meta do not see it: which operations run in which dtype, with their casts
as kernels of their own.

The lists are torch's (its page "Automatic Mixed Precision package"): of an accelerator, and the
shorter one of a CPU. Weights are cast at every use; torch keeps the casts of a forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.engine.model import tree

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
