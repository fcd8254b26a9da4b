"""Warm up, take turns, drain: the shape that 1F1B gave to most families after it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from penstock.schedule.op import Kind, Op


def alternate(
    warm_up: int,
    forwards: Sequence[Op],
    backwards: Sequence[Op],
    weights: Sequence[Op] = (),
    delay: int = 0,
) -> list[Op]:
    """The first ``warm_up`` forwards, then one forward, one backward and one weight gradient in
    turn, until each kind runs out.

    Args:
        warm_up: how many forwards go first.
        forwards: in their order.
        backwards: B, or I where the weight gradients are separate; in their order.
        weights: W, in their order.
        delay: how many backwards the first weight gradient lets pass.
    """
    columns = (forwards[warm_up:], backwards, (*[None] * delay, *weights))
    turns = (op for turn in zip_longest(*columns) for op in turn if op is not None)
    return [*forwards[:warm_up], *turns]


def in_order(stage: int, kind: Kind, num_microbatches: int) -> list[Op]:
    """One op of a kind for each microbatch."""
    return [Op(stage, kind, microbatch) for microbatch in range(num_microbatches)]


def alternate_split(stage: int, num_microbatches: int, warm_up: int, delay: int) -> list[Op]:
    """``alternate`` with F, I and W of one stage."""
    forwards, inputs, weights = (
        in_order(stage, kind, num_microbatches)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    return alternate(warm_up, forwards, inputs, weights, delay)
