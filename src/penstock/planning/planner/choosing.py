"""``choices``: the plans among which people choose, each with what it takes and why it loses.

Beside the best plan of every kind on all devices stand the fastest on fewer of them, and whatever
no other plan beats in time, memory and devices at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from penstock.base.errors import InputError
from penstock.base.telling import Telling
from penstock.base.units import count_of, format_bytes, format_seconds
from penstock.core.cluster import Cluster
from penstock.core.graph import LayerGraph
from penstock.drawing.choice_page import ChoicePicture, DrawnOption, PartOfStep
from penstock.drawing.timeline.excerpt import steady_part
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.judged import Judged
from penstock.planning.planner.objective import (
    ClusterPart,
    PartsOfCluster,
    best_part,
    check_prices,
)
from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.race import SAME
from penstock.planning.planner.request import PlanRequest
from penstock.planning.planner.search import checked, priced
from penstock.planning.planner.why import CUT_SHORT, Rival
from penstock.planning.plans.picture import fold_of, memory_of_stages
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.seconds import MEANINGS, SecondsOfRank, seconds_of_ranks, slowest_of
from penstock.planning.plans.spending import Spending, spending_of
from penstock.planning.plans.table import full_title

_MOST_OPTIONS = 14
_MOST_SIZES = 6
_MOST_DRAWN = 100_000
"""Ops of a step that is simulated to be drawn."""


class PlanOption(NamedTuple):
    """One of the plans.

    Attributes:
        label: of what it is the best.
        plan: what would be done.
        verdict: why it was chosen, or why not.
        is_possible: whether it fits, and is what was asked for.
    """

    label: str
    plan: Plan
    verdict: str
    is_possible: bool = True

    @property
    def memory_bytes(self) -> int:
        """Bytes on the rank that needs most."""
        return max(self.plan.rank_bytes)

    @property
    def spending(self) -> Spending:
        """What a step takes of devices."""
        return spending_of(self.plan)


@dataclass(frozen=True)
class PlanChoices:
    """Plans to choose from; ``penstock.draw(choices, "page.html")`` makes a page of them.

    Attributes:
        options: the chosen one first, the others by their time.
    """

    options: tuple[PlanOption, ...]

    @property
    def plan(self) -> Plan:
        """The plan that was chosen."""
        return self.options[0].plan

    def efficient(self, measure: str) -> tuple[PlanOption, ...]:
        """The plans that no other one beats in time and one more measure, the fastest first.

        Args:
            measure: ``"memory"``, ``"devices"`` or ``"cost"``.
        """
        possible = (option for option in self.options if option.is_possible)
        ordered = sorted(possible, key=lambda o: (o.plan.step_seconds, _MEASURES[measure](o)))
        least, efficient = inf, []
        for option in ordered:
            if _MEASURES[measure](option) < least:
                least = _MEASURES[measure](option)
                efficient.append(option)
        return tuple(efficient)

    def _choices_(self) -> ChoicePicture:
        efficient = {
            measure: frozenset(self.options.index(option) for option in self.efficient(measure))
            for measure in _MEASURES
        }
        return ChoicePicture(
            title=full_title(self.plan),
            options=tuple(map(_drawn, self.options)),
            efficient=efficient,
            in_money=self.options[0].spending.in_money,
        )


_MEASURES = {
    "memory": lambda option: option.memory_bytes,
    "devices": lambda option: option.plan.num_seats,
    "cost": lambda option: option.spending.amount,
}


def choices(graph: LayerGraph, cluster: Cluster | None = None, **request: Any) -> PlanChoices:
    """Find the plan for a request, and what else there is to choose from.

    Args:
        graph: the profiled model.
        cluster: devices; by default this machine's cores.
        request: what else ``plan`` can be asked, but no ``rate``, ``placer="reinforce"`` or
            ``spill="always"``.

    Raises:
        PlanError: as ``plan``.
        InputError: as ``plan``, or one of these.
    """
    asked = PlanRequest(**request)
    if asked.rate is not None or asked.placer == "reinforce" or asked.spill == "always":
        raise InputError(
            "plans for a rate, of placer='reinforce' or with spill='always' stand alone; leave "
            "that out to choose among several, or draw the plan itself"
        )
    checked(graph, cluster)
    cluster = priced(cluster or Cluster.local(), asked.price_per_hour)
    check_prices(cluster, asked)
    with Telling("planning, and looking at what else there is") as telling:
        patience = PlanningPatience(asked.patience_seconds, telling.update)
        parts = PartsOfCluster(graph, cluster, asked, patience)
        whole = parts.best(ClusterPart(cluster), inf)
        named = {} if whole is None else whole.rivals(patience)
        if asked.objective != "time":
            plan = best_part(parts)
        elif whole is None:
            plan = parts.plan_on_all(asked)  # whose stages come and go, or none
        else:
            plan = whole.plan(named)
        labelled: list[_Labelled] = []
        verdict = plan.reason
        if whole is not None and not patience.as_long_again.spend(
            lambda: labelled.extend(_labelled(parts, whole, named)), lambda: True
        ):
            verdict += "; there was no time to look at all that there is to choose from"
    return PlanChoices((PlanOption("chosen", plan, verdict), *_others(plan, labelled)))


class _Labelled(NamedTuple):
    label: str
    candidate: Candidate
    is_wanted: bool = True
    is_cut_short: bool = False


def _labelled(
    parts: PartsOfCluster, whole: Judged, named: Mapping[str, Rival]
) -> Iterator[_Labelled]:
    """Candidates of all kinds, the most different first.

    Args:
        whole: the choice on all devices.
        named: its rivals.
    """
    for label, rival in named.items():
        if not rival.is_bound:
            late = rival.candidate.setting.versions.asynchronous
            is_wanted = not late or whole.constraints.asynchronous != "no"
            # Rivals that fit nowhere were found where memory does not count.
            own = rival.candidate.limited_like(whole.chosen)
            yield _Labelled(label, own, is_wanted, rival.is_cut_short)
    for size in _sizes(parts):
        if parts.patience.is_interrupted:  # whoever waits wants to see what there is
            break
        judged = [parts.best(part, inf) for part in parts.of_size(size)]
        for each in judged:
            if each is not None:
                label = f"on {count_of(each.num_devices, 'device')}"
                yield _Labelled(label, each.chosen, is_cut_short=bool(each.end))
    for candidate in _frugal(whole):
        yield _Labelled("less memory", candidate)


def _sizes(parts: PartsOfCluster) -> list[int]:
    """Some numbers of devices below all of them: halves of halves, of hosts and of one host, and
    nearly all."""
    whole = parts.whole_hosts()
    sizes = {len(parts.cluster.devices) * 3 // 4} if len(whole) == 1 else {*whole[-2:-1]}
    for numbers in (whole, range(1, whole[0] + 1)):
        sizes |= {
            numbers[(len(numbers) >> power) - 1] for power in range(len(numbers).bit_length())
        }
    return sorted(sizes - {0, len(parts.cluster.devices)})[-_MOST_SIZES:]


def _frugal(whole: Judged) -> list[Candidate]:
    """Of what was simulated on all devices, what needs less memory than all that is as fast."""
    least, frugal = inf, []
    for candidate in sorted(whole.contenders, key=lambda each: each.seconds):
        needed = max(candidate.rank_bytes)
        if needed < least * (1 - _WORTH) and candidate.setting.is_final:
            least = needed
            frugal.append(candidate)
    return frugal


_WORTH = 0.1
"""Relative: how much less memory is worth a look."""


def _others(plan: Plan, labelled: Sequence[_Labelled]) -> list[PlanOption]:
    """All but the plan itself, each once, the fastest first."""
    seen, options = {_essence(plan)}, list[PlanOption]()
    for label, candidate, is_wanted, is_cut_short in labelled:
        excess, other = candidate.excess, candidate.to_plan()
        if _essence(other) in seen or len(options) >= _MOST_OPTIONS - 1:
            continue
        seen.add(_essence(other))
        verdict = _verdict(other, plan)
        if is_cut_short:
            verdict = f"{verdict} ({CUT_SHORT})"
        if excess.num_bytes > 0:
            over = format_bytes(excess.num_bytes)
            verdict = f"does not fit, {over} over {excess.place}; {verdict}"
        if not is_wanted:
            verdict = f"learns from old weights, which was not asked for; {verdict}"
        options.append(PlanOption(label, other, verdict, is_wanted and excess.num_bytes <= 0))
    return sorted(options, key=lambda option: option.plan.step_seconds)


def _essence(plan: Plan) -> tuple[object, ...]:
    stages = tuple((s.layers, s.rank, s.recompute, tuple(s.splits.items())) for s in plan.stages)
    return plan.schedule, plan.versions, plan.replicas, stages, plan.num_seats, plan.microbatch_size


_FOR = {
    "compute": "to compute",
    "collectives": "for tensor ranks to exchange",
    "launch": "to launch ops",
    "recompute": "to run forward twice",
    "update": "to update",
    "hops": "for messages",
    "sums": "to sum gradients",
    "tiers": "for what comes and goes",
    "bubble": "idle",
}


def _verdict(other: Plan, chosen: Plan) -> str:
    """Why a plan that fits is not the chosen one: what makes it slower, or what it needs more."""
    slower = other.step_seconds - chosen.step_seconds
    if slower > SAME * chosen.step_seconds:
        own, usual = (_of_slowest(plan) for plan in (other, chosen))
        more = {name: own[k] - usual[k] for k, name in enumerate(SecondsOfRank._fields)}
        worst = max(more, key=more.__getitem__)
        words = f"{other.step_seconds / chosen.step_seconds:.2f}× as long"
        if more[worst] > slower / 4:
            words += f": {format_seconds(more[worst])} more {_FOR[worst]}"
        return f"{words}{_instead(other, chosen)}"
    if slower < -SAME * chosen.step_seconds:
        faster = chosen.step_seconds / other.step_seconds
        return f"{faster:.2f}× as fast{_instead(other, chosen)}"
    return f"as fast{_instead(other, chosen)}"


def _of_slowest(plan: Plan) -> SecondsOfRank:
    ranks = seconds_of_ranks(plan)
    return ranks[slowest_of(ranks)]


def _instead(other: Plan, chosen: Plan) -> str:
    """What a plan needs less, or more, than the chosen one."""
    words = []
    needed, usual = max(other.rank_bytes), max(chosen.rank_bytes)
    if usual and abs(needed / usual - 1) > SAME:
        words.append(f"{needed / usual:.0%} of its memory")
    if other.num_seats != chosen.num_seats:
        words.append(f"{count_of(other.num_seats, 'device')} instead of {chosen.num_seats}")
    return f", with {' and '.join(words)}" if words else ""


def _drawn(option: PlanOption) -> DrawnOption:
    plan = option.plan
    ranks = seconds_of_ranks(plan)
    slowest = slowest_of(ranks)
    parts = zip(MEANINGS.items(), ranks[slowest], strict=True)
    return DrawnOption(
        label=option.label,
        title=full_title(plan),
        verdict=option.verdict,
        is_possible=option.is_possible,
        seconds=plan.step_seconds,
        memory_bytes=option.memory_bytes,
        num_devices=plan.num_seats,
        cost=option.spending.amount,
        cost_words=str(option.spending),
        slowest=slowest,
        parts=tuple(PartOfStep(name, words, max(took, 0.0)) for (name, words), took in parts),
        memory=tuple(memory_of_stages(plan)),
        timeline=_timeline(plan),
    )


def _timeline(plan: Plan) -> Any:
    """What is drawn of a step; nothing where that would take long."""
    if plan.prediction.left_out or plan.placement.num_ops > _MOST_DRAWN:
        return None
    if plan.prediction.flushes:
        return fold_of(plan, plan.simulate())
    return steady_part(plan.prediction.timeline, plan.num_microbatches)
