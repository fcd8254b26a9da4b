"""Dropout that draws the mask of the whole value and keeps its member's part of it.

So the mask is the same on every mesh, and different features never share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.tensor.layouts import Layout
from penstock.engine.tensor.membership import Member
from penstock.engine.tensor.memory_order import memory_order, put_back

FEATURE_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS = (nn.Dropout, *FEATURE_DROPOUTS)
"""Modules of which a member can keep its part of the whole value's mask."""


class PartChannelDropout(Member, nn.modules.dropout._DropoutNd):
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


class PartDropout(Member, nn.Dropout):
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
