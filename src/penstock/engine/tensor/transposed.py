"""Linear layers that keep their weights as inputs × outputs, as GPT-2 in ``transformers`` does."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.tensor.layouts import as_copies, summed
from penstock.engine.tensor.membership import Member
from penstock.engine.tensor.parts import bounds


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is such a layer: ``transformers``' Conv1D, told without importing it."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if type(module).__name__ != "Conv1D" or weight is None or bias is None:
        return False
    shape = (getattr(module, "nx", None), getattr(module, "nf", None))
    return tuple(weight.shape) == shape and not module._modules


class ColumnTransposed(Member, nn.Module):
    """Each member computes its part of the outputs: all inputs → features."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``[…, inputs] → […, part of outputs]``."""
        here = self.membership
        here.region.enter()
        return F.linear(as_copies(x, here.around, here.group), self.weight.t(), self.bias)


class RowTransposed(Member, nn.Module):
    """Each member takes its part of the inputs, and outputs are summed: features → any layout."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``[…, part of inputs] → […, outputs]``, in the layout of the membership."""
        here = self.membership
        output = summed(F.linear(x, self.weight.t()), here.gives, here.group)
        here.region.leave()
        return output + self.bias


class SplittingHeads(Member, nn.Module):
    """An attention that cuts what its projection gives into pieces of ``split_size``: of a member,
    those of its heads."""

    head_dim: int

    @property
    def split_size(self) -> int:
        """The width of the own heads together."""
        group = self.membership.group
        whole = int(self.__dict__["split_size"]) // self.head_dim
        return bounds(whole, group.size, group.index).length * self.head_dim
