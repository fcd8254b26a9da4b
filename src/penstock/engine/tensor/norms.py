"""Norms of which each member has some of the channels.

Statistics are those of whole channels, or of whole groups of channels, so they are what one device
computes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.tensor.membership import Member
from penstock.engine.tensor.parts import bounds


class ChannelNorm(Member, nn.modules.batchnorm._BatchNorm):
    """Normalises the channels that a member has; parameters and statistics are parts, too."""


class PartInstanceNorm(Member, nn.modules.instancenorm._InstanceNorm):
    """Normalises every row of the channels that a member has."""

    @property
    def num_features(self) -> int:  # type: ignore[override]
        """How many channels those are."""
        group = self.membership.group
        return bounds(int(self.__dict__["num_features"]), group.size, group.index).length


class PartGroupNorm(Member, nn.GroupNorm):
    """Normalises the groups of channels that a member has; each has as many of them."""

    def forward(self, input: Tensor) -> Tensor:
        """``[rows, part of the channels, …]``, the same shape."""
        groups = self.num_groups // self.membership.group.size
        return F.group_norm(input, groups, self.weight, self.bias, self.eps)
