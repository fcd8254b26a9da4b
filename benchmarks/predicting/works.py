"""What ``predictions.py`` trains: models of different kinds, each with a minibatch.

They differ in what keeps a core busy: arithmetic (convolutions, wide attention), memory (large
linear layers, whose weights fit in no cache and whose gradients are allocated anew for every
microbatch), thousands of small operations (LSTM), or the interpreter (thin layers).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock as pk
from examples.models import resnet
from penstock.demo.corpus import workload as demo_workload

MICROBATCHES = 8


@dataclass
class Work:
    """A model to train, and its minibatch."""

    name: str
    model: nn.Module
    loss: Callable[[Any, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: tuple[Tensor, Tensor]


sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def gpt() -> Work:
    """The demo's GPT."""
    loaded = demo_workload()
    inputs, targets = loaded.first_batch()
    return Work("GPT", loaded.build_model(), loaded.loss, loaded.optimizer, (inputs, targets))


def resnet50() -> Work:
    """On small images; batch norm per microbatch."""
    return _resnet("ResNet-50", resnet.build(), rows=2)


def small_resnet() -> Work:
    """So thin that an op of a stage takes a millisecond or two, much of it in Python."""
    return _resnet("thin ResNet", resnet.ResNet(blocks=(2, 2, 2), width=16, classes=10), rows=4)


def _resnet(name: str, model: nn.Module, rows: int) -> Work:
    images, labels = _images(rows, pixels=64)
    captured = pk.capture(model, images[:rows], granularity="block")
    return Work(name, captured, nn.functional.cross_entropy, sgd, (images, labels))


def _images(rows: int, pixels: int) -> tuple[Tensor, Tensor]:
    """With microbatches of so many rows."""
    torch.manual_seed(0)
    images = torch.randn(rows * MICROBATCHES, 3, pixels, pixels)
    return images, torch.randint(10, (len(images),))


def vgg() -> Work:
    """Like VGG on small images: convolutions, then linear layers with weights of 64 and 16 MiB."""
    batch = _images(rows=4, pixels=32)
    channels = (3, 32, 64, 128, 256)
    blocks = (
        nn.Sequential(nn.Conv2d(*pair, 3, padding=1), nn.ReLU(), *_pool(index))
        for index, pair in enumerate(itertools.pairwise(channels))
    )
    wide = (nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in ((4096, 4096), (4096, 1024)))
    model = nn.Sequential(*blocks, nn.Flatten(), *wide, nn.Linear(1024, 10))
    return Work("VGG-like", model, nn.functional.cross_entropy, sgd, batch)


def _pool(index: int) -> list[nn.Module]:
    return [nn.MaxPool2d(2)] if index else []


class Recurrent(nn.Module):
    """An LSTM whose state nobody wants."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        """[rows, tokens, width] → the same shape."""
        output: Tensor = self.lstm(value)[0]
        return output


def lstm() -> Work:
    """Six LSTM layers, one behind the other."""
    torch.manual_seed(0)
    width, rows, tokens = 192, 8, 32
    model = nn.Sequential(*(Recurrent(width) for _ in range(6)), nn.Linear(width, 64))
    inputs = torch.randn(rows * MICROBATCHES, tokens, width)
    targets = torch.randn(rows * MICROBATCHES, tokens, 64)
    return Work("LSTM", model, nn.functional.mse_loss, sgd, (inputs, targets))


def mlp() -> Work:
    """A perceptron so thin that half of it takes about a millisecond."""
    torch.manual_seed(0)
    width, rows = 384, 32
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(12))
    inputs, targets = (torch.randn(rows * MICROBATCHES, width) for _ in range(2))
    return Work("thin MLP", nn.Sequential(*layers), nn.functional.mse_loss, sgd, (inputs, targets))


def attention() -> Work:
    """Six layers of attention over 384 tokens."""
    torch.manual_seed(0)
    width, rows, tokens = 128, 1, 384
    block = partial(nn.TransformerEncoderLayer, width, 4, 2 * width, dropout=0.0, batch_first=True)
    model = nn.Sequential(*(block(norm_first=True) for _ in range(6)), nn.Linear(width, 64))
    inputs = torch.randn(rows * MICROBATCHES, tokens, width)
    targets = torch.randn(rows * MICROBATCHES, tokens, 64)
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    return Work("attention", model, nn.functional.mse_loss, adamw, (inputs, targets))


WORKS: dict[str, Callable[[], Work]] = {
    "GPT": gpt,
    "ResNet-50": resnet50,
    "thin ResNet": small_resnet,
    "VGG-like": vgg,
    "LSTM": lstm,
    "thin MLP": mlp,
    "attention": attention,
}
