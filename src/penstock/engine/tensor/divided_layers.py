"""Linear layers, convolutions and norms of which each member has some of the outputs, or of the
inputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.tensor.layouts import as_copies, summed
from penstock.engine.tensor.membership import Member
from penstock.engine.tensor.parts import bounds


class ColumnConv(Member, nn.modules.conv._ConvNd):
    """Each member computes its part of the output channels."""

    def forward(self, input: Tensor) -> Tensor:
        """``[rows, in_channels, …] → [rows, part of out_channels, …]``."""
        here = self.membership
        # Counted from the end, channels are where they are without a dimension of rows, too.
        here.region.enter(-1 - len(self.kernel_size))
        copies = as_copies(input, here.around, here.group)
        return self._conv_forward(copies, self.weight, self.bias)


class RowConv(Member, nn.modules.conv._ConvNd):
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


class ColumnLinear(Member, nn.Linear):
    """Each member computes its part of the outputs: all inputs → features."""

    def forward(self, input: Tensor) -> Tensor:
        """``[…, in_features] → […, part of out_features]``."""
        here = self.membership
        here.region.enter()
        return F.linear(as_copies(input, here.around, here.group), self.weight, self.bias)


class RowLinear(Member, nn.Linear):
    """Each member takes its part of the inputs, and outputs are summed: features → any layout."""

    def forward(self, input: Tensor) -> Tensor:
        """``[…, part of in_features] → […, out_features]``, in the layout of the membership."""
        here = self.membership
        output = summed(F.linear(input, self.weight), here.gives, here.group)
        here.region.leave()
        return output if self.bias is None else output + self.bias


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
