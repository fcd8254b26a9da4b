"""torch's attention, of which each member computes some of the heads, and any module that is
divided by heads as a whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.tensor.divided_layers import (
    ColumnLinear,
    ColumnTransposed,
    RowLinear,
    RowTransposed,
    ShardDropout,
    SplittingHeads,
    is_transposed,
)
from penstock.engine.tensor.group import ShardSpec, bounds
from penstock.engine.tensor.layouts import FEATURES, WHOLE, as_copies, converted, gather, summed
from penstock.engine.tensor.membership import GroupMember, ModuleSharing


class HeadAttention(GroupMember, nn.MultiheadAttention):
    """Each member projects to its own heads, attends with them, and hands them to ``out_proj``,
    which sums what all heads give.

    torch's own forward takes the width of a head from the width of its input, so this is written
    anew: the same operations in the same order, with masks and dropout of the own heads.
    """

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # Fused kernels, here and in nn.TransformerEncoderLayer, would take the parts for the whole.
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention``: the output, and the weights if they are wanted.

        Masks may come as the value does, with a part on every member, or whole.

        Raises:
            ModelError: nested tensors, a value without rows that is divided, or ``is_causal``
                without a mask.
        """
        here = self.membership
        here.region.enter()
        self._check(query, attn_mask, is_causal)
        batched = query.dim() == 3
        copies = {id(x): as_copies(x, here.around, here.group) for x in (query, key, value)}
        given = [self._rows_first(copies[id(x)], batched) for x in (query, key, value)]
        (rows, length), positions = given[0].shape[:2], given[1].shape[1]
        if key_padding_mask is not None:
            padding = key_padding_mask if batched else key_padding_mask.unsqueeze(0)
            key_padding_mask = self._whole(padding, (rows, positions))
        if attn_mask is not None:
            own = (length,) if attn_mask.dim() == 2 else (rows * self.num_heads, length)
            attn_mask = self._whole(attn_mask, (*own, positions))
        causal = is_causal and key_padding_mask is None and not need_weights
        queries, keys, values = self._projected(*given)
        mask = self._mask(
            key_padding_mask, None if causal else attn_mask, rows, query.dtype,
            keys.shape[2] - positions,
        )  # fmt: skip
        has_weights = need_weights or bool(self.training and self.dropout)
        if causal and has_weights:
            seen = torch.ones(length, keys.shape[2], dtype=torch.bool, device=keys.device)
            mask = _added(~seen.tril(), query.dtype)
        if not has_weights:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=causal
            )
            return self._output(attended, batched), None
        weights = self._weights(queries, keys, mask)
        output = self._output(weights @ values, batched)
        if not need_weights:
            return output, None
        shown = self._shown(weights, average_attn_weights)
        return output, shown if batched else shown.squeeze(0)

    def _output(self, attended: Tensor, batched: bool) -> Tensor:
        joined = attended.transpose(1, 2).flatten(2)
        if not self.batch_first or not batched:
            joined = joined.transpose(0, 1)
        output: Tensor = self.out_proj(joined if batched else joined.squeeze(1))
        if self.batch_first and batched:  # it lies in memory as torch's does, for dropout behind it
            turned = output.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            output = turned.transpose(0, 1)
        return output

    def _check(self, query: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
        here = self.membership
        if query.is_nested:
            raise ModelError(
                f"{here.name!r} is given nested tensors, which cannot be split by heads; give "
                "nn.TransformerEncoder enable_nested_tensor=False"
            )
        if query.dim() != 3 and here.around is not WHOLE:
            raise ModelError(
                f"{here.name!r} is given a tensor without rows, which cannot be divided; let all "
                'tensor ranks repeat its layer (split "whole")'
            )
        if is_causal and attn_mask is None:
            raise ModelError(f"{here.name!r}: is_causal=True needs an attn_mask, as in torch")

    def _rows_first(self, value: Tensor, batched: bool) -> Tensor:
        if not batched:
            return value.unsqueeze(0)
        return value if self.batch_first else value.transpose(0, 1)

    def _whole(self, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A mask for everything, of which members may have been given a part each."""
        group, dim = self.membership.group, self.membership.around
        if dim is None:
            return mask
        lengths = group.tell(mask.shape[dim])
        # Where all have all of it, this is as many times the length as there are members.
        return gather(mask, group, dim) if sum(lengths) == shape[dim] else mask

    def _projected(self, *given: Tensor) -> list[Tensor]:
        """Queries, keys and values of the own heads: ``[rows, own heads, positions, width]``."""
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)  # type: ignore[assignment]
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        made = [F.linear(*each) for each in zip(given, weights, biases, strict=True)]
        rows = made[0].shape[0]
        for place, bias in ((1, self.bias_k), (2, self.bias_v)):
            if bias is not None:
                made[place] = torch.cat([made[place], bias.expand(rows, -1, -1)], 1)
            if self.add_zero_attn:
                made[place] = F.pad(made[place], (0, 0, 0, 1))
        return [
            torch.unflatten(projected, -1, (-1, self.head_dim)).transpose(1, 2)
            for projected in made
        ]

    def _mask(
        self,
        padding: Tensor | None,
        attn_mask: Tensor | None,
        rows: int,
        dtype: torch.dtype,
        more: int,
    ) -> Tensor | None:
        """The mask that is added to the scores of the own heads.

        Args:
            more: positions behind those of the keys that were given, which all may look at.
        """
        total = None
        if attn_mask is not None:
            total = _added(attn_mask, dtype)
            if total.dim() == 3:
                here = self.membership
                own = bounds(self.num_heads, here.group.size, here.group.index)
                by_head = torch.unflatten(total, 0, (rows, self.num_heads))
                total = by_head.narrow(1, own.start, own.length)
        if padding is not None:
            hidden = _added(padding, dtype)[:, None, None, :]
            total = hidden if total is None else total + hidden
        return total if total is None or not more else F.pad(total, (0, more))

    def _weights(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """``[rows, own heads, queries, keys]``, dropped out as on one device."""
        scores = (queries * self.head_dim**-0.5) @ keys.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        if not self.training or not self.dropout:
            return weights
        here = self.membership
        own = bounds(self.num_heads, here.group.size, here.group.index)
        shape = (weights.shape[0], self.num_heads, *weights.shape[2:])
        here.region.check()
        mask = F.dropout(weights.new_ones(shape), self.dropout)
        here.region.drawn()
        return weights * mask.narrow(1, own.start, own.length)

    def _shown(self, weights: Tensor, average: bool) -> Tensor:
        """The weights of all heads, in the layout of the layer."""
        here = self.membership
        if average:
            return summed(weights.sum(1) / self.num_heads, here.around, here.group)
        every = gather(weights, here.group, 1)
        mine: Tensor = converted(every, WHOLE, here.around, here.group, here.name)
        return mine


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: ``True`` hides."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


ModuleSharings = dict[str, ModuleSharing]
"""By the names of modules in a module; ``""`` is the module itself."""

_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

COLUMN = ModuleSharing(ColumnLinear, {"weight": ShardSpec(0), "bias": ShardSpec(0)}, FEATURES)
ROW = ModuleSharing(RowLinear, {"weight": ShardSpec(1)}, FEATURES, adds=True, bias="bias")


def by_heads(module: nn.Module, name: str) -> ModuleSharings:
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


def _attention(module: nn.MultiheadAttention) -> ModuleSharings:
    width = module.head_dim
    cuts = {
        "in_proj_weight": ShardSpec(0, 3, width),
        "in_proj_bias": ShardSpec(0, 3, width),
        **{f"{name}_proj_weight": ShardSpec(0, 1, width) for name in "qkv"},
        "bias_k": ShardSpec(2, 1, width),
        "bias_v": ShardSpec(2, 1, width),
    }
    own = ModuleSharing(HeadAttention, cuts, pieces=module.num_heads)
    out = ModuleSharing(
        RowLinear, {"weight": ShardSpec(1, 1, width)}, FEATURES, adds=True, bias="bias"
    )
    return {"": own, "out_proj": out}


def _block(module: nn.Module, name: str) -> ModuleSharings:
    ways = {
        "linear1": COLUMN,
        "dropout": ModuleSharing(ShardDropout, features=FEATURES),
        "linear2": ROW,
    }
    for attention in ("self_attn", "multihead_attn"):
        if attention in module._modules:
            inner = by_heads(module.get_submodule(attention), f"{name}.{attention}")
            ways |= {f"{attention}.{path}".rstrip("."): way for path, way in inner.items()}
    return ways


def _is_splitting_attention(module: nn.Module) -> bool:
    """Whether it is an attention as GPT-2's in ``transformers``, told without importing it."""
    projections = [module._modules.get(name) for name in ("c_attn", "c_proj")]
    return (
        all(projection is not None and is_transposed(projection) for projection in projections)
        and "q_attn" not in module._modules
        and all(isinstance(vars(module).get(name), int) for name in ("split_size", "head_dim"))
    )


def _splitting_attention(module: nn.Module) -> ModuleSharings:
    width = int(vars(module)["head_dim"])
    heads = int(vars(module)["split_size"]) // width
    column = {"weight": ShardSpec(1, 3, width), "bias": ShardSpec(0, 3, width)}
    return {
        "": ModuleSharing(SplittingHeads, pieces=heads),
        "c_attn": ModuleSharing(ColumnTransposed, column, FEATURES),
        "c_proj": ModuleSharing(
            RowTransposed, {"weight": ShardSpec(0, 1, width)}, FEATURES, adds=True, bias="bias"
        ),
    }
