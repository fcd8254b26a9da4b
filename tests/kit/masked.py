"""An encoder whose padding mask crosses every cut beside what it computes."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, LENGTH = 16, 10


class MaskedLayer(nn.TransformerEncoderLayer):
    """Takes and gives (value, mask); notes how each leaf came."""

    def __init__(self):
        super().__init__(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.seen = []

    def forward(self, pair):
        value, mask = pair
        if torch.is_grad_enabled():
            self.seen.append((value.requires_grad, mask.requires_grad))
        return super().forward(value, src_key_padding_mask=mask), mask


class MaskedHead(nn.Linear):
    def forward(self, pair):
        return super().forward(pair[0]).mean(1)


def masked_encoder(num_layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*[MaskedLayer() for _ in range(num_layers)], MaskedHead(WIDTH, 4))


def masked_batch(rows=8, seed=1):
    """((values, what is added to scores), targets)."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, LENGTH, WIDTH, generator=generator)
    lengths = torch.randint(5, LENGTH, (rows, 1), generator=generator)
    mask = torch.zeros(rows, LENGTH).masked_fill_(torch.arange(LENGTH) >= lengths, -torch.inf)
    return (values, mask), torch.randint(0, 4, (rows,), generator=generator)
