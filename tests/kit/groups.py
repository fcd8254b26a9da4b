"""Groups of threads that share layers, and models to share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

from penstock.engine.tensor.group import ChannelGroup
from penstock.engine.transport import ThreadExchange
from tests.kit.training import DEADLINE_SECONDS


def together(size, function, deadline_seconds=DEADLINE_SECONDS):
    """What ``function(group)`` gives each of ``size`` members, who run at the same time.

    The first error of any member is raised; the others are woken.
    """
    exchange = ThreadExchange(size, deadline_seconds)

    def run(index):
        transport = exchange.transports[index]
        try:
            return function(ChannelGroup(transport, range(size), index))
        except BaseException as error:
            transport.fail(f"member {index} failed: {error}", ())
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, index) for index in range(size)]
    return [future.result() for future in futures]


WORDS = 11


class Embed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens):
        return self.dropout(self.tokens(tokens))


class Down(nn.Module):
    """Leaves a skip for ``Up``."""

    stashes = ("early",)

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, value):
        return torch.tanh(self.mix(value)), {"early": value}


class Up(nn.Module):
    recalls = ("early",)

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, value, early):
        return self.mix(value) + early


class Block(nn.Module):
    """Attention by heads and an MLP, each behind a norm, with dropout inside and behind."""

    def __init__(self, width, head_width):
        super().__init__()
        self.head_width = head_width
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, value):
        mixed = self.mix(self.norm(value)).unflatten(-1, (3, -1, self.head_width))
        queries, keys, values = mixed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        value = value + self.dropout(self.project(attended.transpose(1, 2).flatten(2)))
        return value + self.dropout(self.mlp(self.mlp_norm(value)))


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, WORDS, bias=False)

    def forward(self, value):
        return self.logits(self.norm(value))


class Net(nn.Module):
    """A transformer with a skip from its second layer to the one before the last, and a head that
    is tied to the embedding."""

    def __init__(self, tied=True, width=8):
        super().__init__()
        self.embed = Embed(width)
        self.down = Down(width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(2))
        self.up = Up(width)
        self.head = Head(width)
        if tied:
            self.head.logits.weight = self.embed.tokens.weight

    def spine(self):
        return [self.embed, self.down, *self.blocks, self.up, self.head]


SPLITS = {
    "embed.tokens": "row",
    "down": "data",
    "blocks.0": "data",
    "blocks.1": "sequence",
    "blocks.*.mix": "column/3",
    "blocks.*.project": "row",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "features",
    "blocks.*.mlp.3": "row",
    "head.logits": "column",
}
"""Every kind of split of a ``Net``; ``up`` is repeated."""


def make_net(tied=True):
    torch.manual_seed(0)
    return Net(tied).double()


def net_batch(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (rows, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def net_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
