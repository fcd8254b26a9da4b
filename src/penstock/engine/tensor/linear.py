"""Linear layers of which each member has some of the outputs, or of the inputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.tensor.layouts import as_copies, summed
from penstock.engine.tensor.membership import Member


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
