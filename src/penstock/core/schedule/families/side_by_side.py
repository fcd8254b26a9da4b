"""Pipelines side by side: any family that drains, with as many replicas of every stage.

Each copy of the pipeline performs the family's own schedule for its share of the microbatches, so
nothing about the order is new: microbatch k is microbatch k div r of copy k mod r, and copy c of
rank q is rank q·r + c. Stages that have unlike numbers of replicas need an order of their own,
which 1F1B and GPipe have (``options.round_robin``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from penstock.base.errors import InputError
from penstock.base.units import count_of
from penstock.core.schedule.columns import Columns
from penstock.core.schedule.families.options import Replicas, read_replicas
from penstock.core.schedule.schedule import Schedule

MEANING = "of each stage, all alike, as in `2-2`: so many pipelines side by side; one by default."
"""What the option ``replicas`` says about such a family."""


def replicated(name: str, function: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """A family that also takes ``replicas``: the one behind ``function``, or several of its
    pipelines side by side.

    Args:
        name: the family's.
        function: builds one pipeline.
    """

    @wraps(function)
    def build(
        num_ranks: int, num_microbatches: int, *values: Any, replicas: Replicas = "", **options: Any
    ) -> Schedule:
        counts = read_alike(name, replicas)
        copies = counts[0] if counts else 1
        _check_shares(name, num_ranks, num_microbatches, copies)
        # As many microbatches for all, or one more for the first copies: two orders at most.
        shares = [len(range(copy, num_microbatches, copies)) for copy in range(copies)]
        orders = {
            share: function(num_ranks // copies, share, *values, **options)
            for share in dict.fromkeys(shares)
        }
        pipeline = orders[shares[0]]
        if counts and len(counts) != pipeline.num_stages:
            raise InputError(
                f"{name}: replicas are given for {count_of(len(counts), 'stage')}, but "
                f"{count_of(num_ranks // copies, 'rank')} of each pipeline have "
                f"{pipeline.num_stages}; give a count for each"
            )
        return side_by_side([orders[share] for share in shares])

    taken = inspect.signature(function)
    option = inspect.Parameter(
        "replicas", inspect.Parameter.KEYWORD_ONLY, default="", annotation=Replicas
    )
    described: Any = build
    described.__signature__ = taken.replace(parameters=[*taken.parameters.values(), option])
    described.__annotations__ = {**function.__annotations__, "replicas": Replicas}
    return build


def side_by_side(pipelines: Sequence[Schedule]) -> Schedule:
    """One schedule of pipelines that have the same stages on the same ranks, each on ranks of its
    own: the copies of a rank follow one another, and microbatches go to the copies in turns."""
    copies = len(pipelines)
    if copies == 1:
        return pipelines[0]
    spans = zip(*(pipeline.columns.spans() for pipeline in pipelines), strict=True)
    ranks = []
    for of_rank in spans:
        for copy, (pipeline, span) in enumerate(zip(pipelines, of_rank, strict=True)):
            own = pipeline.columns
            microbatch = own.microbatch[span] * np.int32(copies) + np.int32(copy)
            ranks.append((own.stage[span], own.kind[span], microbatch, own.slice[span]))
    return pipelines[0].with_columns(Columns.of_fields(ranks))


def first_pipeline(schedule: Schedule, copies: int) -> Schedule:
    """The first of several pipelines side by side, with the microbatches that all have."""
    columns = schedule.columns
    fields = []
    for span in columns.spans()[::copies]:
        microbatch = columns.microbatch[span] // np.int32(copies)
        fields.append((columns.stage[span], columns.kind[span], microbatch, columns.slice[span]))
    own = Columns.of_fields(fields)
    return schedule.with_columns(own.only(own.microbatch < schedule.num_microbatches // copies))


def read_alike(name: str, replicas: Replicas) -> tuple[int, ...]:
    """A count for every stage, all alike; none if nothing is said.

    Args:
        name: the family's.

    Raises:
        InputError: it is no list of counts, one is below 1, or they differ.
    """
    try:
        counts = read_replicas(replicas)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if len({*counts}) > 1:
        raise InputError(
            f"{name}: replicas are {'-'.join(map(str, counts))}, but its pipelines stand side by "
            "side, so all stages have as many; 1f1b and gpipe can have unlike ones"
        )
    return counts


def _check_shares(name: str, num_ranks: int, num_microbatches: int, copies: int) -> None:
    if num_ranks % copies:
        raise InputError(
            f"{name}: {count_of(num_ranks, 'rank')} cannot be {count_of(copies, 'pipeline')} of "
            f"as many ranks; take a multiple of {copies}"
        )
    if num_microbatches < copies:
        raise InputError(
            f"{name}: a stage has {copies} replicas, but there are only {num_microbatches} "
            "microbatches; each replica needs at least one"
        )
