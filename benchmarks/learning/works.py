"""What ``convergence.py`` beside this file trains: a small GPT on real text, a small CNN on digits.

Both have eight layers of about the same cost, so that 2, 4 and 8 stages are even. Neither has batch
norm or dropout, so that the size of microbatches makes no difference to what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.demo.corpus import Corpus
from penstock.demo.gpt import GPT
from penstock.demo.gpt import loss as token_loss

Batch = tuple[Tensor, Tensor]
NUM_LAYERS = 8
CONTEXT, WIDTH = 64, 48
GPT_ROWS, CNN_ROWS = 8, 32
SCALE = 5.0
"""Weights begin with a deviation of 0.1, which suits this width, instead of GPT-2's 0.02. With that
one, hundreds of updates pass before anything but how frequent each byte is gets learned."""
CHANNELS = 16
HELD_OUT_DIGITS = 360


@dataclass(frozen=True)
class Work:
    """A model with its data.

    Attributes:
        name: in tables and files.
        title: for people.
        build: a model with the weights that a seed gives.
        loss: of outputs and targets, a mean.
        batches: so many minibatches, by count and seed.
        held_out: inputs and targets that are never trained on.
        epoch_updates: how many minibatches all data make.
    """

    name: str
    title: str
    build: Callable[[int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: Callable[[int, int], list[Batch]]
    held_out: Batch
    epoch_updates: int


def gpt_work() -> Work:
    """A byte-level GPT of 0.2 M parameters on the sources of Python's standard library."""
    corpus = Corpus.standard_library()

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = GPT(width=WIDTH, heads=3, layers=NUM_LAYERS - 2, context=CONTEXT)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(SCALE)
        return model

    def batches(count: int, seed: int) -> list[Batch]:
        return list(islice(corpus.batches(GPT_ROWS, CONTEXT, seed), count))

    held_out = corpus.held_out(64, CONTEXT)
    epoch = len(corpus.training) // (GPT_ROWS * CONTEXT)
    return Work("gpt", "GPT on text", build, token_loss, batches, held_out, epoch)


def cnn_work() -> Work:
    """Seven convolutions and a linear layer on scikit-learn's digits, 8 × 8 pixels each."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "the digits are scikit-learn's, which is not installed: pip install scikit-learn, or "
            "leave them out with --works gpt"
        ) from None
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs = (torch.tensor(images, dtype=torch.float32) / 8 - 1).view(-1, 1, 8, 8)[order]
    targets = torch.tensor(labels, dtype=torch.long)[order]
    training = inputs[HELD_OUT_DIGITS:], targets[HELD_OUT_DIGITS:]
    held_out = inputs[:HELD_OUT_DIGITS], targets[:HELD_OUT_DIGITS]

    def batches(count: int, seed: int) -> list[Batch]:
        return list(islice(_epochs(training, CNN_ROWS, seed), count))

    epoch = len(training[1]) // CNN_ROWS
    return Work("cnn", "CNN on digits", _cnn, F.cross_entropy, batches, held_out, epoch)


def _epochs(data: Batch, rows: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(data[1]), generator=generator)
        for start in range(0, len(order) - rows + 1, rows):
            chosen = order[start : start + rows]
            yield data[0][chosen], data[1][chosen]


def _cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for number in range(NUM_LAYERS - 1):
        convolution = nn.Conv2d(CHANNELS if number else 1, CHANNELS, 3, padding=1, bias=False)
        layers.append(nn.Sequential(convolution, nn.GroupNorm(4, CHANNELS), nn.ReLU()))
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * CHANNELS, 10)))
    return nn.Sequential(*layers)


WORKS: dict[str, Callable[[], Work]] = {"gpt": gpt_work, "cnn": cnn_work}
