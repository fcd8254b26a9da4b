"""The lectures' models, estimated on their devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import penstock as pk
from examples.models import alexnet, amoebanet, awd_lstm, gnmt, inception, resnet, s2vt, vgg
from examples.models.sizes import classified


class Untied(awd_lstm.AWDLSTM):
    """The language model as PipeDream cut it: words by a matrix of their own, since stages that
    learn with old weights cannot share the embedding's."""

    def __init__(self, embedding: int, hidden: int, vocabulary: int) -> None:
        super().__init__(embedding, hidden, vocabulary)
        del self.bias
        self.words = nn.Linear(embedding, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, length] → logits [rows, length, vocabulary]."""
        value = self.input_dropout(self.embedding(tokens))
        for index, layer in enumerate(self.layers):
            value = layer(self.between(value) if index else value)
        logits: Tensor = self.words(self.output_dropout(value))
        return logits


def untied(size: str = "paper") -> Untied:
    """The same sizes as of the model that is tied."""
    sizes = awd_lstm.SIZES[size]
    return Untied(sizes["embedding"], sizes["hidden"], sizes["vocabulary"])


class Work(NamedTuple):
    """A model as a lecture trains it.

    Attributes:
        module: of ``examples.models``.
        size: one of the module's.
        rows: a GPU's share of a minibatch.
        build: makes the model; by default the module's.
        granularity: of its layers; by default as `pk.estimate` finds best.
    """

    module: Any
    size: str
    rows: int
    build: Callable[[str], nn.Module] | None = None
    granularity: Literal["module", "block"] | None = None


WORKS = {
    "VGG-16": Work(vgg, "paper", 64),
    "ResNet-50": Work(resnet, "paper", 128),
    "AlexNet": Work(alexnet, "paper", 256),
    "Inception-v3": Work(inception, "paper", 32),
    "GNMT-8": Work(gnmt, "paper", 64),
    "GNMT-16": Work(gnmt, "sixteen", 64),
    "AWD-LM": Work(awd_lstm, "paper", 80, untied),
    "S2VT": Work(s2vt, "paper", 80),
    "AmoebaNet-D": Work(amoebanet, "paper", 16, granularity="block"),
}
"""The lectures name no minibatches; these are the papers' or usual ones, and part of the guess."""


@cache
def graph_of(name: str, device: str, software: str = "eager") -> pk.LayerGraph:
    """A model's graph on a device of the catalogue, in fp32, with momentum."""
    work = WORKS[name]
    with torch.device("meta"):
        model: nn.Module = (work.build or work.module.build)(work.size)
    inputs, targets = work.module.batch(2, work.size, torch.Generator())

    def of_all_rows(tensor: Tensor) -> Tensor:
        return torch.empty((work.rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    loss: Callable[..., Any] = getattr(work.module, "loss", classified)
    return pk.estimate(
        model,
        tree_map(of_all_rows, inputs),
        targets=of_all_rows(targets),
        loss=loss,
        device=device,
        software=software,
        granularity=work.granularity,
        optimizer=momentum,
    )


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all of them."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def learning_seconds(graph: pk.LayerGraph) -> float:
    """Of a microbatch, forward and backward on one device."""
    return sum(layer.forward_seconds + layer.backward_seconds for layer in graph.layers)
