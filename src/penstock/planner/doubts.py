"""Whether a plan would still be chosen if what ranks cost each other is a little off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from penstock.planner.candidate import Candidate
from penstock.planner.race import SAME
from penstock.units import format_seconds

_SPREADS = 2
"""How many standard errors the truth may well be away."""

_MOST_RIVALS = 6
_MOST_OPS = 100_000
"""That are simulated for this."""


def doubts_about(chosen: Candidate, rivals: Sequence[Candidate]) -> Iterator[str]:
    """What people should know before they trust the choice, with figures and a remedy.

    Args:
        rivals: which fit and might have been chosen.
    """
    contention = chosen.task.graph.contention
    if not contention.num_ranks or not chosen.task.topology.shared_memories:
        return
    yield from chosen.task.graph.warnings
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
