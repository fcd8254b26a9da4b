"""Dropout that draws the mask of the whole value and keeps its member's part of it.

So the mask is the same on every mesh, and different features never share one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.tensor.layouts import Layout
from penstock.tensor.membership import Member


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
        own = torch.tensor([input.shape[dim]])
        lengths = [int(length) for length in group.exchange([own] * group.size)]
        shape = [*input.shape]
        shape[dim] = sum(lengths)
        self.membership.region.check()
        mask = F.dropout(torch.ones(shape, dtype=input.dtype, device=input.device), self.p)
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
