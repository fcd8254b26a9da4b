"""Modules that are divided by heads as a whole: which modules in them are divided, and how.

Attention projects, attends head by head, and projects back. Of a transformer's block, the first
linear layer gives members their part of the hidden features, which the second one takes up.
"""

from __future__ import annotations

from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.tensor.attention import HeadAttention
from penstock.engine.tensor.cuts import Cut
from penstock.engine.tensor.dropout import PartDropout
from penstock.engine.tensor.layouts import FEATURES
from penstock.engine.tensor.linear import ColumnLinear, RowLinear
from penstock.engine.tensor.module_way import Way
from penstock.engine.tensor.transposed import (
    ColumnTransposed,
    RowTransposed,
    SplittingHeads,
    is_transposed,
)

Ways = dict[str, Way]
"""By the names of modules in a module; ``""`` is the module itself."""

_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

COLUMN = Way(ColumnLinear, {"weight": Cut(0), "bias": Cut(0)}, FEATURES)
ROW = Way(RowLinear, {"weight": Cut(1)}, FEATURES, adds=True, bias="bias")


def by_heads(module: nn.Module, name: str) -> Ways:
    """How members share what is in a module, by heads and by the features of its MLP.

    Args:
        name: of the module, for errors.

    Returns:
        Nothing if it is no attention, and no block, that is known here.

    Raises:
        ModelError: it is one of a kind that cannot be divided.
    """
    if isinstance(module, nn.MultiheadAttention):
        if type(module).forward is not nn.MultiheadAttention.forward:
            raise ModelError(
                f"{name!r} ({type(module).__name__}) has a forward of its own, so that nobody "
                "knows how its heads are computed; split the linear layers in it"
            )
        return _attention(module)
    if is_block(module):
        return _block(module, name)
    return _splitting_attention(module) if _is_splitting_attention(module) else {}


def is_block(module: nn.Module) -> bool:
    """Whether a module is a block of torch's, with a forward that is known."""
    return any(
        isinstance(module, kind) and type(module).forward is kind.forward for kind in _BLOCKS
    )


def _attention(module: nn.MultiheadAttention) -> Ways:
    width = module.head_dim
    cuts = {
        "in_proj_weight": Cut(0, 3, width),
        "in_proj_bias": Cut(0, 3, width),
        **{f"{name}_proj_weight": Cut(0, 1, width) for name in "qkv"},
        "bias_k": Cut(2, 1, width),
        "bias_v": Cut(2, 1, width),
    }
    own = Way(HeadAttention, cuts, pieces=module.num_heads)
    out = Way(RowLinear, {"weight": Cut(1, 1, width)}, FEATURES, adds=True, bias="bias")
    return {"": own, "out_proj": out}


def _block(module: nn.Module, name: str) -> Ways:
    ways = {"linear1": COLUMN, "dropout": Way(PartDropout, features=FEATURES), "linear2": ROW}
    for attention in ("self_attn", "multihead_attn"):
        if attention in module._modules:
            inner = by_heads(module.get_submodule(attention), f"{name}.{attention}")
            ways |= {f"{attention}.{path}".rstrip("."): way for path, way in inner.items()}
    return ways


def _is_splitting_attention(module: nn.Module) -> bool:
    """Whether it is an attention as GPT-2's in ``transformers``, told without importing it."""
    projections = [module._modules.get(name) for name in ("c_attn", "c_proj")]
    return (
        all(one is not None and is_transposed(one) for one in projections)
        and "q_attn" not in module._modules
        and all(isinstance(vars(module).get(name), int) for name in ("split_size", "head_dim"))
    )


def _splitting_attention(module: nn.Module) -> Ways:
    width = int(vars(module)["head_dim"])
    heads = int(vars(module)["split_size"]) // width
    column = {"weight": Cut(1, 3, width), "bias": Cut(0, 3, width)}
    return {
        "": Way(SplittingHeads, pieces=heads),
        "c_attn": Way(ColumnTransposed, column, FEATURES),
        "c_proj": Way(
            RowTransposed, {"weight": Cut(0, 1, width)}, FEATURES, adds=True, bias="bias"
        ),
    }
