"""Modules of torch of which each member has a part.

Linear layers, convolutions and norms have some of the outputs or of the inputs, embeddings some of
the features or of the vocabulary. So have linear layers that keep their weights as inputs ×
outputs, as GPT-2's in ``transformers`` do.

Dropout draws the mask of the whole value and keeps its member's part of it. So the mask is the same
on every mesh, and different features never share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.tensor.group import bounds, memory_order, put_back
from penstock.engine.tensor.layouts import Layout, converted, summed
from penstock.engine.tensor.membership import GroupMember

FEATURE_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS = (nn.Dropout, *FEATURE_DROPOUTS)
"""Modules of which a member can keep its part of the whole value's mask."""


class ShardChannelDropout(GroupMember, nn.modules.dropout._DropoutNd):
    """Dropout of whole channels, of a value of which each member has some rows or channels."""

    def forward(self, input: Tensor) -> Tensor:
        """``[rows, channels, …]``; dropped as the whole value would be."""
        here = self.membership
        dim = here.gives if here.region.inside else here.around
        if not self.training or self.p == 0.0 or dim is None:
            output: Tensor = super().forward(input)
            return output
        if dim not in (0, 1) or input.dim() < 3:
            raise ModelError(
                f"{here.name!r} drops out channels of what is divided along dimension {dim} of "
                f'{input.dim()}; let all tensor ranks repeat its layer (split "whole")'
            )
        lengths = here.group.tell(input.shape[dim])
        shape = [*input.shape[:2], *[1] * (input.dim() - 2)]
        shape[dim] = sum(lengths)
        here.region.check()
        mask: Tensor = super().forward(input.new_ones(shape))
        here.region.drawn()
        return input * torch.split(mask, lengths, dim)[here.group.index]


class ShardDropout(GroupMember, nn.Dropout):
    """Dropout of a value of which each member has a part.

    In a region, ``membership.gives`` says along which dimension; outside, it is as the layer.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Of any shape; dropped as the whole value would be.

        Raises:
            ModelError: nobody says how its values lie where they lie by features.
        """
        layout = self._layout()
        if not self.training or self.p == 0.0 or layout is None:
            return F.dropout(input, self.p, self.training)
        group, dim = self.membership.group, layout % input.dim()
        lengths = group.tell(input.shape[dim])
        shape = [*input.shape]
        shape[dim] = sum(lengths)
        self.membership.region.check()
        mask = mask_of_whole(input, shape, self.p)
        self.membership.region.drawn()
        return input * torch.split(mask, lengths, dim)[group.index]

    def _layout(self) -> Layout:
        here = self.membership
        if not here.region.inside:
            return here.around
        if here.gives is None and self.training and self.p:
            raise ModelError(
                f"{here.name!r} drops out where each tensor rank has its part of the features: "
                'between a "column" split and the "row" split behind it. Split it as "features" if '
                'they are its last dimension, or as "heads" if heads are its second'
            )
        return here.gives


def mask_of_whole(part: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """The mask of dropout for a whole value, of ``shape``, of which a member has a part.

    Numbers are drawn in the order in which they lie in memory, which is that of the part's.
    """
    order = memory_order(part)
    return put_back(F.dropout(part.new_ones([shape[dim] for dim in order]), p), order)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is such a layer: ``transformers``' Conv1D, told without importing it."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if type(module).__name__ != "Conv1D" or weight is None or bias is None:
        return False
    shape = (getattr(module, "nx", None), getattr(module, "nf", None))
    return tuple(weight.shape) == shape and not module._modules


class ColumnTransposed(GroupMember, nn.Module):
    """Each member computes its part of the outputs: all inputs → features."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``[…, inputs] → […, part of outputs]``."""
        here = self.membership
        here.region.enter()
        return F.linear(here.copies(x), self.weight.t(), self.bias)


class RowTransposed(GroupMember, nn.Module):
    """Each member takes its part of the inputs, and outputs are summed: features → any layout."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``[…, part of inputs] → […, outputs]``, in the layout of the membership."""
        here = self.membership
        output = summed(F.linear(x, self.weight.t()), here.gives, here.group)
        here.region.leave()
        return output + self.bias


class SplittingHeads(GroupMember, nn.Module):
    """An attention that cuts what its projection gives into pieces of ``split_size``: of a member,
    those of its heads."""

    head_dim: int

    @property
    def split_size(self) -> int:
        """The width of the own heads together."""
        group = self.membership.group
        whole = int(self.__dict__["split_size"]) // self.head_dim
        return bounds(whole, group.size, group.index).length * self.head_dim


class ColumnEmbedding(GroupMember, nn.Embedding):
    """Each member has its part of the features: all tokens → features."""

    def forward(self, input: Tensor) -> Tensor:
        """``int64[…] → […, part of embedding_dim]``."""
        here = self.membership
        here.region.enter()
        tokens = converted(input, here.around, None, here.group, here.name)
        return F.embedding(tokens, self.weight, self.padding_idx)


class RowEmbedding(GroupMember, nn.Embedding):
    """Each member looks up the tokens of its part of the vocabulary, and everyone adds up."""

    def forward(self, input: Tensor) -> Tensor:
        """``int64[…] → […, embedding_dim]``, in the layout of the membership."""
        here = self.membership
        tokens = converted(input, here.around, None, here.group, here.name)
        own = bounds(self.num_embeddings, here.group.size, here.group.index)
        elsewhere = (tokens < own.start) | (tokens >= own.stop)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - own.start if own.start <= padding < own.stop else None
        local = (tokens - own.start).masked_fill(elsewhere, 0)
        term = F.embedding(local, self.weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return summed(term, here.gives, here.group)


class ColumnConv(GroupMember, nn.modules.conv._ConvNd):
    """Each member computes its part of the output channels."""

    def forward(self, input: Tensor) -> Tensor:
        """``[rows, in_channels, …] → [rows, part of out_channels, …]``."""
        here = self.membership
        # Counted from the end, channels are where they are without a dimension of rows, too.
        here.region.enter(-1 - len(self.kernel_size))
        return self._conv_forward(here.copies(input), self.weight, self.bias)


class RowConv(GroupMember, nn.modules.conv._ConvNd):
    """Each member takes its part of the input channels, and outputs are summed."""

    def forward(self, input: Tensor) -> Tensor:
        """``[rows, part of in_channels, …] → [rows, out_channels, …]``, in the layout of the
        membership."""
        here = self.membership
        term = self._conv_forward(input, self.weight, None)
        output = summed(term, here.gives, here.group)
        here.region.leave()
        if self.bias is None:
            return output
        return output + self.bias.view(-1, *[1] * len(self.kernel_size))


class ColumnLinear(GroupMember, nn.Linear):
    """Each member computes its part of the outputs: all inputs → features."""

    def forward(self, input: Tensor) -> Tensor:
        """``[…, in_features] → […, part of out_features]``."""
        here = self.membership
        here.region.enter()
        return F.linear(here.copies(input), self.weight, self.bias)


class RowLinear(GroupMember, nn.Linear):
    """Each member takes its part of the inputs, and outputs are summed: features → any layout."""

    def forward(self, input: Tensor) -> Tensor:
        """``[…, part of in_features] → […, out_features]``, in the layout of the membership."""
        here = self.membership
        output = summed(F.linear(input, self.weight), here.gives, here.group)
        here.region.leave()
        return output if self.bias is None else output + self.bias


class ChannelNorm(GroupMember, nn.modules.batchnorm._BatchNorm):
    """Normalises the channels that a member has; parameters and statistics are parts, too."""


class ShardInstanceNorm(GroupMember, nn.modules.instancenorm._InstanceNorm):
    """Normalises every row of the channels that a member has."""

    @property
    def num_features(self) -> int:  # type: ignore[override]
        """How many channels those are."""
        group = self.membership.group
        return bounds(int(self.__dict__["num_features"]), group.size, group.index).length


class ShardGroupNorm(GroupMember, nn.GroupNorm):
    """Normalises the groups of channels that a member has; each has as many of them."""

    def forward(self, input: Tensor) -> Tensor:
        """``[rows, part of the channels, …]``, the same shape."""
        groups = self.num_groups // self.membership.group.size
        return F.group_norm(input, groups, self.weight, self.bias, self.eps)
