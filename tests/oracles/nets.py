"""Random models: a list of layer names is a model, so that a failing one can be printed and shrunk.

Every layer maps [rows, LENGTH, WIDTH] to the same shape, so any list of them is a model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LENGTH, TOKENS, CLASSES = 6, 4, 11, 3


class Conv(nn.Module):
    """Convolves along the positions; its output is a transposed view."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, value):
        return self.conv(value.transpose(1, 2)).transpose(1, 2)


class Picture(nn.Module):
    """Convolves positions × channels as a picture, with batch norm."""

    def __init__(self):
        super().__init__()
        self.widen = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.narrow = nn.Conv2d(3, 1, 1)

    def forward(self, value):
        return self.narrow(F.relu(self.norm(self.widen(value.unsqueeze(1))))).squeeze(1)


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, value):
        return self.norm(value.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, value):
        return self.gru(value)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, value):
        query, key, values = self.project(value).chunk(3, -1)
        return value + F.scaled_dot_product_attention(query, key, values, is_causal=True)


class Heads(nn.Module):
    """torch's own attention, with two heads and dropout."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, value):
        return value + self.attend(value, value, value, need_weights=False)[0]


class Shift(nn.Module):
    """Adds a parameter that is read through a view."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, value):
        return value + self.shift.expand(LENGTH, WIDTH)


class Strided(nn.Module):
    """Hands on a view with the strides of its transpose."""

    def forward(self, value):
        return value.transpose(1, 2).contiguous().transpose(1, 2)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        return self.linear(value).mul_(1.5).tanh_()


class Unused(nn.Module):
    """Has a parameter that no output depends on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.randn(3))

    def forward(self, value):
        return self.linear(value)


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Counting(nn.Module):
    """Keeps a buffer that every forward in training replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value):
        if self.training:
            self.seen = self.seen + 1
        return value * 0.9


class ToDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        return {"plain": value, "pair": (self.linear(value), 2.0)}


class FromDict(nn.Module):
    def forward(self, value):
        mapped, factor = value["pair"]
        return value["plain"] + factor * mapped


class Stash(nn.Module):
    stashes = ("skip",)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        return self.linear(value), {"skip": value[:, :1]}


class Recall(nn.Module):
    recalls = ("skip",)

    def forward(self, value, skip):
        return value + skip


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens):
        return self.table(tokens)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, value):
        return self.linear(value.mean(1))


SIMPLE = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "conv": Conv,
    "picture": Picture,
    "batch norm": BatchNorm,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, LENGTH),
    "dropout": lambda: nn.Dropout(0.3),
    "dropout in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2, True)),
    "gru": Recurrent,
    "attention": Attention,
    "heads": Heads,
    "gelu": nn.GELU,
    "shift": Shift,
    "strided": Strided,
    "in place": InPlace,
    "unused": Unused,
    "frozen": Frozen,
    "counting": Counting,
}
PAIRS = {"dict": (ToDict, FromDict), "skip": (Stash, Recall)}
"""Two layers that belong together; what stands between a stash and its recall may be anything."""
WITH_STATISTICS = frozenset({"picture", "batch norm", "counting"})


class Net(nn.Module):
    """Layers by name, between an optional embedding and a head.

    Args:
        names: of layers; ``"dict"`` stands for two, ``"skip"`` opens at its first occurrence and
            closes at the next (or before the head), ``"tied"`` repeats the weight of one linear
            layer.
        tokens: whether the input is tokens.
    """

    def __init__(self, names, tokens):
        super().__init__()
        self.layers = nn.ModuleList(_layers(names, tokens))

    def spine(self):
        return list(self.layers)

    def forward(self, value):
        skips = {}
        for layer in self.layers:
            value = run(layer, value, skips)
        return value


def run(layer, value, skips):
    """Run one layer, which may leave something in ``skips`` or take it out."""
    recalled = {key: skips.pop(key) for key in getattr(layer, "recalls", ())}
    result = layer(value, **recalled)
    if not getattr(layer, "stashes", ()):
        return result
    output, stashed = result
    skips.update(stashed)
    return output


def _layers(names, tokens):
    if tokens:
        yield Embed()
    tied, opened, skipped = None, False, False
    for name in names:
        if name == "tied":
            layer = nn.Linear(WIDTH, WIDTH)
            if tied is None:
                tied = layer.weight
            layer.weight = tied
            yield layer
        elif name == "dict":
            yield from (ToDict(), FromDict())
        elif name == "skip":
            if opened:
                yield Recall()
                opened = False
            elif not skipped:
                yield Stash()
                opened = skipped = True
        else:
            yield SIMPLE[name]()
    if opened:
        yield Recall()
    yield Head()


def make(names, tokens, dtype, seed=0):
    """The model of these names; equal arguments give equal weights."""
    torch.manual_seed(seed)
    return Net(names, tokens).to(dtype)


def batch(rows, tokens, dtype, seed):
    """(inputs, targets) for a model."""
    generator = torch.Generator().manual_seed(1000 + seed)
    targets = torch.randint(0, CLASSES, (rows,), generator=generator)
    if tokens:
        return torch.randint(0, TOKENS, (rows, LENGTH), generator=generator), targets
    inputs = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets
