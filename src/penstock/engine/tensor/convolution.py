"""Convolutions of which each member has some of the channels that come out, or that go in."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.engine.tensor.layouts import as_copies, summed
from penstock.engine.tensor.membership import Member


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
