"""Layers that a compiled pass, in which nothing is overwritten and nothing decided, must get right,
and layers that it must refuse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class WithLinear(nn.Module):
    """A layer with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class Fork(WithLinear):
    """Gives a nested value, of which one leaf is no tensor."""

    def forward(self, value):
        return self.inner(value), {"gate": torch.tanh(value), "factor": 3}


class Join(WithLinear):
    """Takes what ``Fork`` gives."""

    def forward(self, value):
        own, more = value
        return self.inner(own) * torch.sigmoid(more["gate"]) * more["factor"]


class Fold(nn.Module):
    """Gives a view of what it is given."""

    def forward(self, value):
        return value.view(value.shape[0], 2, -1).transpose(1, 2)


class Unfold(nn.Module):
    """Takes what ``Fold`` gives."""

    def forward(self, value):
        return value.transpose(1, 2).reshape(value.shape[0], -1)


class Stashing(WithLinear):
    """Leaves a skip for ``Recalling``."""

    stashes = ("early",)

    def forward(self, value):
        return self.inner(value), {"early": value}


class Recalling(WithLinear):
    """Takes the skip of ``Stashing``."""

    recalls = ("early",)

    def forward(self, value, early):
        return self.inner(value) + early


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4, batch_first=True)

    def forward(self, value):
        return self.cells(value.view(-1, 4, 4))[0].reshape(-1, WIDTH)


class Attending(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, value):
        tokens = self.norm(value.view(-1, 4, 4))
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].reshape(-1, WIDTH)


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, value):
        return self.second(torch.tanh(self.first(value)))


class Counting(WithLinear):
    """Puts a new tensor in the place of one buffer, and overwrites another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value):
        self.count = self.count + 1
        self.mean.mul_(0.9).add_(0.1 * value.detach().mean(0))
        return self.inner(value) + self.mean / self.count


class HoldingTensor(WithLinear):
    """Reads a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.linspace(0.5, 1, WIDTH)

    def forward(self, value):
        return self.inner(value) * self.mask + torch.arange(WIDTH) / WIDTH


class Biases(nn.Module):
    """Gradients of the parameters and of the input share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, value):
        return value + self.first.expand(value.shape) + self.second


class PartlyUsed(WithLinear):
    """Has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, value):
        return self.inner(value)


class Checkpointed(WithLinear):
    """Recomputes a part of itself."""

    def forward(self, value):
        return torch.utils.checkpoint.checkpoint(self._run, value, use_reentrant=False)

    def _run(self, value):
        return torch.tanh(self.inner(value))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx, *gradients):
        (value,) = ctx.saved_tensors
        return 2 * gradients[0] * value


class OwnBackward(WithLinear):
    """Says itself how it goes backward."""

    def forward(self, value):
        return _Square.apply(self.inner(value))


class SparseTable(nn.Module):
    """Its weights get sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, value):
        return value + self.table(torch.zeros(value.shape[0], dtype=torch.long))


def frozen() -> nn.Module:
    """A layer that is not trained."""
    return linear().requires_grad_(False)


def linear() -> nn.Module:
    """A layer as most are."""
    return nn.Linear(WIDTH, WIDTH)


MODELS = {
    "in place": lambda: [linear(), nn.ReLU(inplace=True), linear(), nn.GELU(), linear()],
    "in place first": lambda: [linear(), linear(), nn.ReLU(inplace=True), linear()],
    "batch norm": lambda: [linear(), nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH)],
    "nested": lambda: [linear(), Fork(), Join(), linear()],
    "view": lambda: [linear(), Fold(), Unfold(), linear()],
    "skip across": lambda: [linear(), Stashing(), Recalling(), linear()],
    "skip within": lambda: [Stashing(), Recalling(), linear(), linear()],
    "recurrent": lambda: [linear(), Recurrent(), Recurrent(), linear()],
    "attention": lambda: [linear(), Attending(), Attending(), linear()],
    "tied": lambda: [linear(), Tied(), Tied(), linear()],
    "counting": lambda: [linear(), Counting(), Counting(), linear()],
    "holding a tensor": lambda: [linear(), HoldingTensor(), HoldingTensor(), linear()],
    "biases": lambda: [linear(), Biases(), Biases(), nn.Identity()],
    "identity": lambda: [linear(), linear(), nn.Identity(), nn.Identity()],
    "partly used": lambda: [linear(), PartlyUsed(), PartlyUsed(), linear()],
    "frozen": lambda: [frozen(), frozen(), frozen(), linear()],
    "checkpointed": lambda: [linear(), Checkpointed(), Checkpointed(), linear()],
    "own backward": lambda: [linear(), OwnBackward(), OwnBackward(), linear()],
    "sparse": lambda: [linear(), SparseTable(), SparseTable(), linear()],
}
"""Layers that are cut in the middle, by name."""


class Branching(WithLinear):
    """Decides by values."""

    def forward(self, value):
        return self.inner(value) if value.sum() > 0 else -self.inner(value)


class Selecting(WithLinear):
    """Gives as many rows as there are values of a kind."""

    def forward(self, value):
        return self.inner(value[value[:, 0] > 0])


class CountingCalls(WithLinear):
    """Counts in an attribute of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, value):
        self.calls += 1
        return self.inner(value) * self.calls


class Caching(WithLinear):
    """Keeps a tensor in an attribute that was not there."""

    def forward(self, value):
        self.last = value
        return self.inner(value)


class OwnReference(WithLinear):
    """Computes with a weight that it holds twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.inner.weight]

    def forward(self, value):
        return F.linear(value, self.weights[0], self.inner.bias)


class Overwriting(WithLinear):
    """Writes into a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = torch.zeros(WIDTH)

    def forward(self, value):
        self.sums.add_(value.detach().sum(0))
        return self.inner(value) + self.sums


class Scaled(WithLinear):
    """Reads a number from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value) * self.scale


REFUSED = {
    "dropout": (lambda: nn.Dropout(0.5), "draws random numbers"),
    "branch": (Branching, "asks for values of a tensor"),
    "selection": (Selecting, "asks for values of a tensor"),
    "counter": (CountingCalls, "assigns calls in its forward"),
    "cache": (Caching, "assigns last in its forward"),
    "reference": (OwnReference, "reference of its own"),
    "overwriting": (Overwriting, "register it with register_buffer"),
}
"""By name: a layer, and a part of the sentence that refuses it."""
