"""Which modules can be given some of the positions, or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.engine.tensor.positions import asks_for_no_values


class Rotation(nn.Module):
    """Asks its input for dtype and device only."""

    def forward(self, x, places):
        angles = places[..., None].float() * torch.arange(4)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Scaled(Rotation):
    def forward(self, x, places):
        cosines, sines = super().forward(x, places)
        return cosines * x[0, 0, 0], sines


class Counted(Rotation):
    def forward(self, x, places):
        return super().forward(x, places)[0] * x.shape[1]


@pytest.mark.parametrize(
    ("module", "expected"), [(Rotation, True), (Scaled, False), (Counted, False)]
)
def test_a_module_that_reads_no_values_is_told_without_a_value_for_each(module, expected):
    # 512 GiB, if somebody made it.
    value = torch.empty(1, 2**13, 2**24, device="meta")
    places = torch.empty(1, 2**13, dtype=torch.long, device="meta")
    assert asks_for_no_values(module(), value, {"places": places}) is expected
