"""What the arguments of ``plan`` mean, before anything is planned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.base.errors import InputError, PlanError
from penstock.base.units import count_of
from penstock.base.values import MOST_BYTES, is_whole, shown, whole
from penstock.core.graph import LayerGraph
from penstock.core.schedule import families
from penstock.core.schedule.families.options import Replicas, read_replicas
from penstock.planning.planner.offers import REPLICATED, Options, check_plannable
from penstock.planning.plans.consistency import MOST_MICROBATCHES

MOST_SIMULATED = 500_000
"""The most ranks times microbatches; candidates with as many take seconds each."""

_SAID_ELSEWHERE = {
    "replicas": "give replicas=… (--replicas)",
    "minibatch": "it follows from the number of microbatches",
}


def read_schedule(text: str | None) -> tuple[str | None, Options]:
    """A schedule family and its options, as in ``interleaved-1f1b:stages_per_rank=4``.

    Raises:
        InputError: no such family, no such option, or one that a plan says elsewhere.
        PlanError: a plan cannot have this family.
    """
    if text is None:
        return None, ()
    family, options = families.named(text)
    for option in options:
        if option in _SAID_ELSEWHERE:
            raise InputError(f"{family}: leave {option} out; {_SAID_ELSEWHERE[option]}")
    check_plannable(family)
    return family, tuple(options.items())


def read_counts(
    replicas: Replicas | None, stages: int | None, schedule: str | None
) -> tuple[tuple[int, ...], int | None]:
    """(replicas of each stage, or nothing where they are not given; the number of stages, if one is
    asked for).

    Raises:
        InputError: they are no counts, or some for a family whose stages have none, or for another
            number of stages.
    """
    may_have = schedule in (None, *REPLICATED)
    if replicas in (None, "any") or not replicas:
        if replicas == "any" and not may_have:
            raise _no_replicas(schedule)
        return (), stages
    counts = read_replicas(replicas)
    if stages not in (None, len(counts)):
        raise InputError(f"replicas are given for {len(counts)} stages, but stages is {stages}")
    if may_have:
        return counts, stages
    if max(counts) > 1:
        raise _no_replicas(schedule)
    return (), len(counts)


def _no_replicas(schedule: str | None) -> InputError:
    return InputError(f"{schedule} has no replicas; {', '.join(REPLICATED)} have")


def read_cuts(graph: LayerGraph, cuts: Sequence[int | str]) -> tuple[int, ...]:
    """Where stages begin, and the number of layers.

    Raises:
        InputError: no such layer, or not in order.
    """
    names = [layer.name for layer in graph.layers]
    bounds = [0]
    for cut in cuts:
        if cut not in names and not (is_whole(cut) and 0 < int(cut) < len(names)):
            raise InputError(
                f"cuts: no stage can begin with layer {shown(cut)}; name a layer behind the first, "
                f"or give its number, 1 to {len(names) - 1}"
            )
        bounds.append(names.index(cut) if isinstance(cut, str) else cut)
    bounds.append(len(names))
    if any(first >= second for first, second in pairwise(bounds)):
        raise InputError(f"cuts: {list(cuts)} are not in the order of the layers")
    return tuple(bounds)


def check_counts(
    graph: LayerGraph,
    microbatches: int | None,
    minibatch: int | None,
    stages: int | None,
    memory_bytes: int | None,
) -> None:
    """Raise ``InputError`` for a count below 1, or ``PlanError`` for more stages than layers."""
    asked = {
        "microbatches": microbatches,
        "minibatch": minibatch,
        "stages": stages,
        "memory_bytes": memory_bytes,
    }
    for name, count in asked.items():
        if count is not None:
            whole(name, count, 1, MOST_BYTES if "bytes" in name else families.LARGEST)
    num_layers = len(graph.layers)
    if stages is not None and stages > num_layers:
        raise PlanError(
            f"{num_layers} layers cannot make {stages} stages, each needs at least one; ask for "
            f"at most {num_layers} stages"
        )


def microbatch_sizes(
    graph: LayerGraph, microbatches: int | None, minibatch: int | None, num_ranks: int
) -> list[tuple[int, int]]:
    """(rows, count) of the microbatches that a minibatch may be cut into, where these are not too
    many to be simulated.

    Args:
        num_ranks: in a straight pipeline through all devices.
    """
    choices = _all_sizes(graph, microbatches, minibatch)
    most = min(MOST_SIMULATED // num_ranks, MOST_MICROBATCHES)
    simulated = [(size, count) for size, count in choices if count <= most]
    if not simulated:
        fewest = min(count for _, count in choices)
        raise InputError(
            f"{fewest:,} microbatches on {count_of(num_ranks, 'rank')} are too many to plan, since "
            f"every op is simulated: ranks × microbatches may be {MOST_SIMULATED:,} at most, and "
            f"microbatches {MOST_MICROBATCHES:,}; ask for {most:,} microbatches, or for a smaller "
            "minibatch"
        )
    return simulated


def _all_sizes(
    graph: LayerGraph, microbatches: int | None, minibatch: int | None
) -> list[tuple[int, int]]:
    if minibatch is None:
        if microbatches is None:
            raise InputError("say how large a minibatch is: give microbatches=…, or minibatch=rows")
        return [(graph.microbatch_size, microbatches)]
    if microbatches is not None:
        if minibatch % microbatches:
            raise InputError(
                f"a minibatch of {minibatch} rows does not make {microbatches} equal microbatches"
            )
        return [(minibatch // microbatches, microbatches)]
    choices = [(size, minibatch // size) for size in graph.sizes if minibatch % size == 0]
    if not choices:
        sizes = ", ".join(map(str, graph.sizes))
        raise InputError(
            f"no microbatch size that was profiled ({sizes} rows) divides "
            f"a minibatch of {minibatch} rows; profile another size or change the minibatch"
        )
    return choices
