"""A GPT and a convolutional net that are deep, and train in a millisecond."""

from __future__ import annotations

import torch
from torch import nn

from penstock.demo import gpt
from penstock.engine.model.spine import run_spine


def make_gpt(dtype=torch.float32):
    torch.manual_seed(0)
    return gpt.GPT(vocabulary=13, width=16, heads=2, layers=8, context=4).to(dtype)


def make_conv_net(dtype=torch.float32, statistics=True):
    """Convolution, batch norm, ReLU; 10 layers with pooling and classifier."""
    torch.manual_seed(0)
    return ConvNet(statistics).to(dtype)


class Block(nn.Sequential):
    def __init__(self, inputs, outputs, statistics):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs, track_running_stats=statistics),
            nn.ReLU(inplace=True),
        )


class ConvNet(nn.Module):
    def __init__(self, statistics):
        super().__init__()
        self.stem = Block(1, 4, statistics)
        self.blocks = nn.ModuleList(Block(4, 4, statistics) for _ in range(7))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(4, 3)

    def spine(self):
        return [self.stem, *self.blocks, self.pool, self.classifier]

    def forward(self, value):
        return run_spine(self.spine(), value)


def gpt_batch(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 13, (rows, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def conv_batch(rows, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(rows, 1, 4, 4, generator=generator, dtype=torch.float64)
    return pictures.to(dtype), torch.randint(0, 3, (rows,), generator=generator)


class Once(torch.autograd.Function):
    """Doubles, and has no second derivative."""

    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * 2
