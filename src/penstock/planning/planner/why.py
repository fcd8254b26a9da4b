"""Why a plan was chosen: what else there was, and what decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import NamedTuple

from msgspec.structs import replace

from penstock.base.units import (
    count_of,
    format_bytes,
    format_seconds,
    format_share,
    format_speed_up,
)
from penstock.core.cluster import Cluster
from penstock.core.schedule.op import Kind
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.race import SAME, sketched
from penstock.planning.planner.request import PLAIN, Constraints
from penstock.planning.planner.task import Task
from penstock.planning.plans.table import Alternative

CUT_SHORT = "its search was cut short"
"""Said of plans beside another one, if a longer search might find better ones of their kind."""

_MATTERS = 0.1
"""A share of the step that is worth a word."""

_PLENTY = 1 << 62
_BUDGET = 50_000
"""Effort to simulate for each row of the table."""
_UNASKED_BUDGET = 12_000
"""The same, for what is not asked for."""


class Rival(NamedTuple):
    """A row of the table.

    Attributes:
        candidate: the best of its kind.
        is_bound: whether it was not simulated, because that takes long, and only what it takes at
            least is known.
        is_cut_short: whether there may be a better one of its kind, for which there was no time.
    """

    candidate: Candidate
    is_bound: bool = False
    is_cut_short: bool = False

    @property
    def seconds(self) -> float:
        """Of a step, or what one takes at least."""
        return self.candidate.least_seconds if self.is_bound else self.candidate.seconds


def rivals(
    tasks: Sequence[Task],
    constraints: Constraints,
    chosen: Candidate | None = None,
    patience: PlanningPatience | None = None,
) -> dict[str, Rival]:
    """The best candidate of every kind of plan, by the kind's label: the fastest that fits, else
    the fastest if memory did not matter. The table costs no more than the answer: what would take
    long is not simulated.

    Args:
        chosen: the best that constraints allow, if somebody has looked.
        patience: of the search. When as much time again is over, or a moment where the search was
            ended, what is known of a kind has to do, and kinds of which nothing is known are left
            out.
    """
    split = [task for task in tasks if task.groups is not None]
    whole = list({id(task.alone): task.alone for task in tasks}.values())
    plain = Constraints(schedule=PLAIN, any_replicas=False, recompute=constraints.recompute)
    everything = Constraints(recompute=constraints.recompute)
    widths = [min(len(task.cluster.devices), task.num_microbatches) for task in whole]
    kinds = {
        "single device": replaced(plain, stages=1),
        "data parallel": replaced(plain, replicas=(max(widths),)),
        "straight pipeline": replaced(plain, least_stages=2),
        "best synchronous": everything,
        "best asynchronous": replaced(everything, asynchronous="only", least_stages=2),
    }
    if max(widths) == 1:
        del kinds["data parallel"]
    asked = chosen is not None and replaced(constraints, spill="where-needed")
    answered = not split and asked
    best: dict[str, Rival | None] = {}
    patience = (patience or PlanningPatience()).as_long_again

    def look() -> None:
        for label, kind in kinds.items():
            is_asked = label != "best asynchronous" or constraints.asynchronous != "no"
            if chosen is not None and answered == kind:
                best[label] = Rival(chosen)
            else:
                budget = _BUDGET if is_asked else _UNASKED_BUDGET
                best[label] = _best(whole, kind, budget, patience)
        if split:
            if chosen is not None and chosen.task.groups is not None and asked == everything:
                best["split layers"] = Rival(chosen)
            else:
                best["split layers"] = _best(split, everything, _BUDGET, patience)

    patience.spend(look, lambda: bool(best))
    return {label: rival for label, rival in best.items() if rival is not None}


def _best(
    tasks: Sequence[Task], constraints: Constraints, budget: int, patience: PlanningPatience
) -> Rival | None:
    return _sketched(tasks, constraints, budget, patience) or _sketched(
        [_roomy(task) for task in tasks], constraints, budget, patience
    )


def _sketched(
    tasks: Sequence[Task], constraints: Constraints, budget: int, patience: PlanningPatience
) -> Rival | None:
    race = sketched(tasks, constraints, budget, patience)
    skipped, winner = race.most_promising, race.winner
    if winner is not None:
        return Rival(winner, is_cut_short=patience.is_over)
    return None if skipped is None else Rival(skipped, is_bound=True)


def _roomy(task: Task) -> Task:
    """The same task with so much memory that it does not count; made once."""
    kept = vars(task)
    if "roomy" not in kept:
        kept["roomy"] = replaced(task, cluster=without_limits(task.cluster), memory_bytes=None)
    roomy: Task = kept["roomy"]
    if not roomy.cache.shapes:
        roomy.cache.shapes.extend(task.cache.shapes)
    return roomy


def without_limits(cluster: Cluster) -> Cluster:
    """A cluster with so much memory that it does not count."""
    return replace(
        cluster,
        devices=tuple(replace(device, memory_bytes=0) for device in cluster.devices),
        memory_bytes=cluster.memory_bytes and _PLENTY,
        groups=tuple(
            replace(group, memory_bytes=group.memory_bytes and _PLENTY) for group in cluster.groups
        ),
    )


def alternatives_of(
    chosen: Candidate, labelled: dict[str, Rival], constraints: Constraints
) -> tuple[Alternative, ...]:
    """The rivals as rows of a table."""
    rows = dict(labelled)
    if not any(_is_same(rival.candidate, chosen) for rival in rows.values()):
        rows = {"this plan": Rival(chosen), **rows}
    return tuple(
        Alternative(
            label=label,
            description=str(rival.candidate),
            step_seconds=rival.seconds,
            is_bound=rival.is_bound,
            bubble=rival.candidate.prediction.bubble_of(rival.seconds),
            memory_bytes=max(rival.candidate.rank_bytes),
            moved_bytes=rival.candidate.moved_bytes,
            delay=rival.candidate.prediction.delay + rival.candidate.way.most_stale,
            remark=_remark(rival, chosen, constraints),
        )
        for label, rival in rows.items()
    )


def simulated(labelled: dict[str, Rival]) -> list[Candidate]:
    """The rivals of which is known how long they take."""
    return [rival.candidate for rival in labelled.values() if not rival.is_bound]


def _remark(rival: Rival, chosen: Candidate, constraints: Constraints) -> str:
    candidate = rival.candidate
    if _is_same(candidate, chosen):
        return "chosen"
    over = candidate.limited_like(chosen).excess
    if over.num_bytes > 0:
        return f"does not fit: {format_bytes(over.num_bytes)} over {over.place}"
    if candidate.setting.versions.asynchronous and constraints.asynchronous == "no":
        return "old weights: not asked for"
    return CUT_SHORT if rival.is_cut_short else ""


def _is_same(first: Candidate, second: Candidate) -> bool:
    return _essence(first) == _essence(second)


def _essence(candidate: Candidate) -> tuple[object, ...]:
    task = candidate.task
    return (
        task.num_tensor_ranks,
        task.graph,
        candidate.setting.terms,
        candidate.cuts,
        candidate.recomputes,
    )


def possible(
    contenders: Sequence[Candidate], chosen: Candidate, constraints: Constraints
) -> list[Candidate]:
    """The contenders of another kind than ``chosen`` that constraints allow and that fit where
    ``chosen`` does.

    Rivals for the table may have been made for another request, so they are looked at again.
    """
    return [
        contender
        for contender in contenders
        if str(contender) != str(chosen)
        and _is_wanted(contender, constraints)
        and contender.limited_like(chosen).fits
    ]


def _is_wanted(candidate: Candidate, constraints: Constraints) -> bool:
    setting = candidate.setting
    return (
        _is_allowed(candidate, constraints)
        and constraints.allows(setting.num_stages)
        and constraints.schedule in (None, setting.schedule.name)
        and set(constraints.options) <= set(setting.options)
        and (constraints.any_replicas or constraints.replicas == setting.replicas)
        and (not constraints.cuts or constraints.cuts == candidate.cuts)
    )


def reason_for(
    chosen: Candidate,
    contenders: Sequence[Candidate],
    labelled: dict[str, Rival],
    constraints: Constraints,
) -> str:
    """One sentence on why ``chosen`` won, with the plan that decided it."""
    speed_up = format_speed_up(labelled["single device"].seconds, chosen.seconds)
    verdict = f"{chosen}: {format_seconds(chosen.seconds)} a step, {speed_up} one device"
    others = [
        candidate
        for candidate in (*contenders, *simulated(labelled))
        if str(candidate) != str(chosen) and _is_allowed(candidate, constraints)
    ]
    fitting = [candidate for candidate in others if candidate.limited_like(chosen).fits]
    faster = min(others, key=lambda candidate: candidate.seconds, default=chosen)
    if faster.seconds < chosen.seconds * (1 - SAME):
        why = "is not what was asked for"
        if faster not in fitting:
            why = f"needs {faster.limited_like(chosen).excess}"
        return f"{verdict}; {faster} would take {format_seconds(faster.seconds)}, but {why}"
    if not fitting:
        return f"{verdict}; nothing else is possible or fits"
    fastest = min(fitting, key=lambda candidate: candidate.seconds)
    return f"{verdict}; {_comparison(chosen, fastest)}"


def why_summed_so(chosen: Candidate) -> str:
    """The time and bytes that summing by owners would take, beside another way that was chosen."""
    usual = replaced(chosen, task=replaced(chosen.task, reducer="owners"))
    words = f"with gradients summed by owners it would take {format_seconds(usual.seconds)}"
    more = max(usual.rank_bytes) - max(chosen.rank_bytes)
    if more > 0:
        words += f" and {format_bytes(more)} more"
    return words


def why_sums_hide(chosen: Candidate) -> str:
    """How much of the longest sum of gradients passes while backwards run; empty where that is
    nothing that matters."""
    stage = max(range(len(chosen.stages)), key=lambda index: chosen.stages[index].reduce_seconds)
    whole, prediction = chosen.stages[stage].reduce_seconds, chosen.prediction
    if chosen.stages[stage].exchange is None or chosen.setting.versions.asynchronous:
        return ""
    if prediction.step is not None:
        handed_in, updated = prediction.step.handed_in[stage], prediction.step.updated[stage]
    else:
        spans = [span for span in prediction.timeline.spans if span.op.stage == stage]
        handed_in = max((s.end for s in spans if s.op.kind is Kind.REDUCE), default=0.0)
        updated = max((s.start for s in spans if s.op.kind is Kind.UPDATE), default=handed_in)
    hidden = whole - (updated - handed_in)
    if hidden < _MATTERS * chosen.seconds:
        return ""
    return (
        f"{format_seconds(hidden)} of the {format_seconds(whole)} that gradients take to be summed "
        "pass while backwards run"
    )


def coarsely(task: Task) -> str:
    """How a model of very many layers was cut."""
    places, layers = len(task.places) - 2, task.num_layers - 1
    return f"cut at {places} of {layers} places, then at all near the best"


def _is_allowed(candidate: Candidate, constraints: Constraints) -> bool:
    return constraints.asynchronous != "no" or not candidate.setting.versions.asynchronous


def _comparison(chosen: Candidate, rival: Candidate) -> str:
    if rival.seconds > chosen.seconds * (1 + SAME):
        return f"{rival} would take {format_seconds(rival.seconds)}{_what_slows(rival, chosen)}"
    as_long = f"{rival} would take as long and "
    if rival.peak > chosen.peak:
        return as_long + f"hold {rival.peak:g} instead of {chosen.peak:g} microbatches"
    if sum(rival.rank_bytes) > sum(chosen.rank_bytes):
        return as_long + f"need {format_bytes(sum(rival.rank_bytes))} in all"
    if rival.setting.num_ranks > chosen.setting.num_ranks:
        return as_long + f"need {count_of(rival.setting.num_ranks, 'device')}"
    return as_long + "is less simple"


def _what_slows(rival: Candidate, chosen: Candidate) -> str:
    """The largest cost that the chosen plan does not have."""
    exchange, recomputed = (
        (_exchange_seconds(rival) - _exchange_seconds(chosen)) / rival.seconds,
        (_again_seconds(rival) - _again_seconds(chosen)) / rival.seconds,
    )
    idle = rival.prediction.bubble - chosen.prediction.bubble
    if exchange >= max(_MATTERS, recomputed):
        return f", {format_seconds(_exchange_seconds(rival))} of it to exchange gradients"
    if recomputed >= _MATTERS:
        return f", {format_seconds(_again_seconds(rival))} of it to run forward twice"
    if idle >= _MATTERS:
        return f", with its devices idle {format_share(rival.prediction.bubble, 0)} of the time"
    return ""


def _exchange_seconds(candidate: Candidate) -> float:
    return max(stage.reduce_seconds for stage in candidate.stages)


def _again_seconds(candidate: Candidate) -> float:
    """Seconds that recomputation adds to a minibatch, at the stage that recomputes most."""
    again = (
        stage.again_seconds / candidate.setting.replicas_of(index)
        for index, stage in enumerate(candidate.stages)
        if stage.recompute != "none"
    )
    return candidate.task.num_microbatches * max(again, default=0.0)
