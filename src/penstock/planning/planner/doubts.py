"""Whether a plan would still be chosen if what was measured is a little off: what ranks cost each
other, and how long layers take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace as replaced
from math import hypot

from msgspec.structs import replace

from penstock.base.units import format_seconds
from penstock.core.catalogue import devices
from penstock.core.cluster import Cluster
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import with_layers_moved
from penstock.planning.planner.race import SAME

_SPREADS = 2
"""How many standard errors the truth may well be away."""

_WORTH = 0.03
"""Relative: how much faster other cuts must be if layers take otherwise than measured."""

_MOST_RIVALS = 6
_MOST_OPS = 100_000
"""That are simulated for this."""


def doubts_about(chosen: Candidate, rivals: Sequence[Candidate]) -> Iterator[str]:
    """The reasons not to trust the choice without a second look, with figures and a remedy.

    Args:
        rivals: which fit and might have been chosen.
    """
    graph = chosen.task.graph
    contention = graph.contention
    if assumed := chosen.task.topology.cluster.assumed:
        yield assumed
    if chosen.task.groups is not None:
        yield from chosen.task.groups.remarks
    if graph.estimate is not None:
        yield str(graph.estimate)
        yield from graph.warnings
        yield from _about_hardware(graph.estimate.device, chosen.task.topology.cluster)
    if contention.num_ranks and chosen.task.topology.shared_memories:
        yield from chosen.task.graph.warnings
        yield from _about_contention(chosen, rivals)
    if not chosen.task.marks:  # else it was asked for these cuts
        yield from _about_layers(chosen)


def _about_hardware(estimated: str, cluster: Cluster) -> Iterator[str]:
    """Whether a graph was estimated for other hardware than a cluster has."""
    if cluster.hardware not in {"", estimated}:
        yield (
            f"the graph was estimated for {estimated}, but the cluster has {cluster.hardware}: "
            f"estimate again with device={cluster.hardware!r}, or take a cluster of {estimated}"
        )
    elif any(device.kind == "cpu" for device in cluster.devices) and estimated in devices():
        yield (
            f"the graph was estimated for {estimated}, but the cluster has CPU cores, as this "
            f'machine does: name one, as in pk.Cluster.of("{estimated}") (8x{estimated})'
        )


def _about_contention(chosen: Candidate, rivals: Sequence[Candidate]) -> Iterator[str]:
    contention = chosen.task.graph.contention
    nearest = _nearest(rivals)
    for num_spreads, end in ((-_SPREADS, "less"), (_SPREADS, "more")):
        shifted = _if_off_by(num_spreads, chosen)
        others = [_if_off_by(num_spreads, candidate) for candidate in nearest]
        best = min(others, key=lambda candidate: candidate.seconds, default=shifted)
        if best.seconds < shifted.seconds * (1 - SAME):
            mode = (shifted if shifted.setting.num_ranks > 1 else best).setting.mode
            yield (
                f"the choice hangs on contention, {contention.of_passes(mode):.2f} ± "
                f"{contention.spread_of(mode):.1%} where ranks work as here: if it is {end}, "
                f"{shifted.task.graph.contention.of_passes(mode):.2f}, {best} would take "
                f"{format_seconds(best.seconds)} and this plan {format_seconds(shifted.seconds)}; "
                "profile again on a quiet machine, or for longer (patience_seconds=…, --patience)"
            )


def _about_layers(chosen: Candidate) -> Iterator[str]:
    """Whether the cuts would be others if the layers of one stage took otherwise than measured; of
    all stages, that of which this costs most."""
    worst, most = "", _WORTH
    for stage in range(chosen.setting.num_stages):
        error = _error_of(chosen, stage)
        # The chosen cuts and four others, twice.
        if not error or 10 * chosen.num_ops * chosen.setting.num_stages > _MOST_OPS:
            continue
        near = [
            candidate
            for candidate in with_layers_moved(chosen)
            if _differs_at(stage, chosen, candidate)
        ]
        for factor in (1 - _SPREADS * error, 1 + _SPREADS * error):
            if factor <= 0:
                continue
            shifted, *others = (
                _if_stage_takes(factor, stage, chosen, candidate) for candidate in (chosen, *near)
            )
            best = min(others, key=lambda candidate: candidate.seconds, default=shifted)
            gain = shifted.seconds / best.seconds - 1
            if gain > most:
                most = gain
                worst = (
                    f"the cuts hang on how long layers take: those of stage {stage} were measured "
                    f"to ± {error:.0%}; if they take {factor:.2f} times as long, "
                    f"{_moved(chosen, best)} would make a step take {format_seconds(best.seconds)} "
                    f"instead of {format_seconds(shifted.seconds)}; profile again on a quiet "
                    "machine, or with more rounds (repeats=…, --repeats)"
                )
    if worst:
        yield worst


def _error_of(candidate: Candidate, stage: int) -> float:
    """How far the sum of a stage's layers may be off, relative to it: the errors of layers are
    their own."""
    start, stop = candidate.cuts[stage : stage + 2]
    layers = candidate.task.graph.layers[start:stop]
    whole = sum(layer.compute_seconds for layer in layers)
    off = hypot(*(layer.spread * layer.compute_seconds for layer in layers))
    return off / whole if whole else 0.0


def _differs_at(stage: int, candidate: Candidate, other: Candidate) -> bool:
    return candidate.cuts[stage : stage + 2] != other.cuts[stage : stage + 2]


def _if_stage_takes(
    factor: float, stage: int, chosen: Candidate, candidate: Candidate
) -> Candidate:
    """A candidate, if the layers of a stage of the chosen one took so many times as long."""
    graph = chosen.task.graph
    start, stop = chosen.cuts[stage : stage + 2]
    layers = tuple(
        layer.paced(factor, factor) if start <= number < stop else layer
        for number, layer in enumerate(graph.layers)
    )
    task = replaced(candidate.task, graph=replace(graph, layers=layers))
    return replaced(candidate, task=task)


def _moved(chosen: Candidate, other: Candidate) -> str:
    """The cut at which two candidates differ."""
    names = [layer.name for layer in chosen.task.graph.layers]
    (pair,) = (pair for pair in zip(chosen.cuts, other.cuts, strict=True) if pair[0] != pair[1])
    return f"a cut before {names[pair[1]]!r} instead of {names[pair[0]]!r}"


def _nearest(rivals: Iterable[Candidate]) -> list[Candidate]:
    """The fastest few of different kinds, as far as they are quickly simulated."""
    kinds: dict[str, Candidate] = {}
    for rival in sorted(rivals, key=lambda rival: rival.seconds):
        kinds.setdefault(str(rival), rival)
    quick, ops = [], 0
    for rival in list(kinds.values())[:_MOST_RIVALS]:
        ops += 2 * rival.num_ops
        if ops <= _MOST_OPS:
            quick.append(rival)
    return quick


def _if_off_by(num_spreads: float, candidate: Candidate) -> Candidate:
    graph = candidate.task.graph
    shifted = replace(graph, contention=graph.contention.shifted(num_spreads))
    return replaced(candidate, task=replaced(candidate.task, graph=shifted))
