"""A model whose experts are divided among copies of a stage, as a profile: less memory on each
copy, tokens that travel there and back, and the busiest copy's share of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock.core.expert_part import ExpertPart
from penstock.core.graph import Layer, LayerGraph

_TRIPS = 2
"""Tokens go to their experts, and what these make of them comes back."""


def with_expert_ranks(
    graph: LayerGraph, num_ranks: int, seconds: Callable[[float], float]
) -> LayerGraph:
    """The profile of a copy where so many divide all experts.

    Args:
        num_ranks: at least 2; all layers' experts can be divided by them.
        seconds: how long a copy takes to send so many bytes to another and to get as many.
    """
    return replace(
        graph,
        layers=tuple(_divided(layer, num_ranks, seconds) for layer in graph.layers),
        other_sizes=(),
    )


def _divided(layer: Layer, num_ranks: int, seconds: Callable[[float], float]) -> Layer:
    if not layer.experts:
        return layer
    own = sum(part.parameter_bytes for part in layer.experts)
    left = layer.parameter_bytes - own + -(-own // num_ranks)
    share = left / layer.parameter_bytes if layer.parameter_bytes else 1.0
    # All copies wait for the one with most tokens.
    longer = sum(part.share * (part.pace(num_ranks) - 1) for part in layer.experts)
    travel = sum(
        _TRIPS * seconds(part.token_bytes * part.imbalance(num_ranks) * (1 - 1 / num_ranks))
        + seconds(8.0 * part.num_experts)
        for part in layer.experts
    )
    pace = 1 + longer
    again = layer.recompute_seconds
    return replace(
        layer.paced(pace, pace),
        forward_seconds=layer.forward_seconds * pace + travel,
        recompute_seconds=None if again is None else again * pace + travel,
        backward_input_seconds=layer.backward_input_seconds * pace + travel,
        collective_seconds=layer.collective_seconds + 2 * travel,
        parameter_bytes=left,
        optimizer_bytes=round(layer.optimizer_bytes * share),
        update_seconds=layer.update_seconds * share,
    )


def mean_loads(experts: Sequence[ExpertPart], num_ranks: int) -> tuple[float, ...]:
    """The share of all tokens of some mixtures that comes to each copy, one mixture counting as
    much as another."""
    rows = [part.rank_loads(num_ranks) for part in experts]
    return tuple(round(sum(column) / len(rows), 4) for column in zip(*rows, strict=True))
