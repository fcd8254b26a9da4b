"""Other goals than the shortest step: the fewest devices that do, or those whose step costs least.

Both are found among parts of the cluster: whole hosts first, then devices of one more host; where
hosts differ, in several orders. Each part is planned by the same race, which knows what it has to
beat: a time that was asked for, or the cheapest so far. A part that cannot reach that even if all
its devices worked all the time, or that lacks the memory, is not planned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from penstock.base.errors import InputError, PlanError
from penstock.base.units import count_of, format_seconds
from penstock.core.cluster import Cluster, Topology
from penstock.core.cluster.cluster import only
from penstock.core.graph import LayerGraph
from penstock.planning.planner.judged import Judged, raced
from penstock.planning.planner.limits import least_busy_seconds, least_excess
from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.request import PlanRequest, RecomputeRule
from penstock.planning.planner.search import SearchInVain, planned, tasks_of, with_rules
from penstock.planning.planner.why import Rival, alternatives_of
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.spending import Spending, tokens_of_graph
from penstock.planning.plans.table import Alternative

_ALL_SIZES = 16
"""Devices of a cluster, or of a host, of which every number is tried."""


def hosts_of(cluster: Cluster) -> list[list[int]]:
    """The devices of each host, by their indices: of each server, where nobody says what a host is;
    a device that is in none stands alone."""
    topology = Topology(cluster)
    hosts: dict[int, list[int]] = {}
    for device, (host, path) in enumerate(zip(topology.hosts, topology.paths, strict=True)):
        hosts.setdefault(path[-1] if host < 0 and path else host, []).append(device)
    return list(hosts.values())


class ClusterPart(NamedTuple):
    """Some devices of a cluster."""

    cluster: Cluster

    @property
    def size(self) -> int:
        """How many devices."""
        return len(self.cluster.devices)

    @property
    def price_per_hour(self) -> float:
        """What all of them cost; 0 where nobody says."""
        return sum(device.price_per_hour for device in self.cluster.devices)


@dataclass
class PartsOfCluster:
    """Parts of a cluster that are planned for the same request.

    Attributes:
        graph: the model.
        cluster: the devices.
        request: what is asked for.
        patience: when it is over, what is there has to do.
        size: devices of the part that is being planned, for whoever waits.
        judged: the fastest plans of the parts that were looked at.
        num_missed: how many were looked at in vain.
        in_vain: the searches for these, where a step might take as long as it will, by the rule of
            recomputing.
    """

    graph: LayerGraph
    cluster: Cluster
    request: PlanRequest
    patience: PlanningPatience = field(default_factory=PlanningPatience)
    size: int = 0
    judged: dict[ClusterPart, Judged] = field(default_factory=dict)
    num_missed: int = 0
    in_vain: dict[tuple[ClusterPart, RecomputeRule], SearchInVain] = field(default_factory=dict)

    def of_size(self, size: int) -> list[ClusterPart]:
        """The different parts with so many devices."""
        parts = (ClusterPart(only(self.cluster, order[:size])) for order in self._orders)
        return [*dict.fromkeys(parts)]

    @property
    def _orders(self) -> list[list[int]]:
        """The devices host by host: as listed, fastest hosts first, cheapest for their speed, and
        those with most memory."""
        devices, hosts = self.cluster.devices, hosts_of(self.cluster)

        def total(host: Sequence[int], name: str) -> float:
            return float(sum(getattr(devices[index], name) for index in host))

        keys: list[Callable[[list[int]], float]] = [
            lambda host: 0.0,
            lambda host: -total(host, "speed"),
            lambda host: total(host, "price_per_hour") / total(host, "speed"),
            lambda host: -total(host, "memory_bytes"),
            lambda host: -max(devices[index].memory_bytes or inf for index in host),
        ]
        orders = [[d for host in sorted(hosts, key=key) for d in host] for key in keys]
        return [list(order) for order in dict.fromkeys(map(tuple, orders))]

    def whole_hosts(self) -> list[int]:
        """How many devices the first 1, 2, … hosts have, in the order in which they are listed."""
        sizes, size = [], 0
        for host in hosts_of(self.cluster):
            size += len(host)
            sizes.append(size)
        return sizes

    def best(self, part: ClusterPart, limit: float) -> Judged | None:
        """The fastest plan on some devices that takes no longer than ``limit`` seconds; ``None``
        where there is none."""
        self.size = part.size
        if part not in self.judged:
            rules = with_rules(part.cluster, self.request)
            there = [each for rule in rules if (each := self._best(part, limit, rule)) is not None]
            if not there:
                return None
            self.judged[part] = min(there, key=lambda each: each.chosen.seconds)
        known = self.judged[part]
        return known if known.chosen.seconds <= limit else None

    def _best(self, part: ClusterPart, limit: float, request: PlanRequest) -> Judged | None:
        if (part, request.recompute) in self.in_vain:
            return None
        constraints = request.constraints(self.graph)
        try:
            tasks = tasks_of(self.graph, part.cluster, request, constraints)
        except PlanError:  # fewer devices than are to share every layer
            return None
        able = [task for task in tasks if least_excess(task) <= 0]
        able = [task for task in able if least_busy_seconds(task) <= limit]
        if not able:
            return None
        race = raced(able, constraints, self.patience, limit)
        final = [c for c in race.contenders if c.seconds <= limit and c.setting.is_final]
        if not final:
            self.num_missed += 1
            if limit == inf:
                self.in_vain[part, request.recompute] = SearchInVain(tasks, race)
            return None
        winner = race.winner
        chosen = winner if winner in final else min(final, key=lambda c: c.seconds)
        assert chosen is not None
        skipped = len(race.skipped)
        return Judged(chosen, race.contenders, tasks, constraints, skipped, race.bound, race.end)

    def plan_on_all(self, request: PlanRequest) -> Plan:
        """The plan on all devices where ``best`` has none, or why there is none.

        Args:
            request: as its own, but for the objective.

        Raises:
            PlanError: nothing fits.
        """
        whole = ClusterPart(self.cluster)
        in_vain = {rule: search for (part, rule), search in self.in_vain.items() if part == whole}
        return planned(self.graph, self.cluster, request, self.patience, in_vain)


def sought(
    graph: LayerGraph, cluster: Cluster, request: PlanRequest, patience: PlanningPatience
) -> Plan:
    """The plan for a request that asks for another objective than time.

    Raises:
        PlanError: nothing fits, or nothing is as fast as was asked for.
        InputError: some of the devices have a price, and others none.
    """
    check_prices(cluster, request)
    parts = PartsOfCluster(graph, cluster, request, patience)
    patience.about = lambda: f"on {count_of(parts.size, 'device')}: "
    return best_part(parts)


def check_prices(cluster: Cluster, request: PlanRequest) -> None:
    """Raise ``InputError`` if costs are to be compared of which some are unknown."""
    prices = [device.price_per_hour for device in cluster.devices]
    if request.objective == "cost" and any(prices) and not all(prices):
        lacking = next(device.name for device in cluster.devices if not device.price_per_hour)
        raise InputError(
            f"device {lacking!r} has no price_per_hour and others have one; give every device "
            "one, or none, to count hours of devices"
        )


def best_part(parts: PartsOfCluster) -> Plan:
    """The plan for a request that asks for another objective than time.

    Raises:
        PlanError: nothing fits, or nothing is as fast as was asked for.
    """
    search, request = _PartSearch(parts), parts.request
    look = search.fewest if request.objective == "devices" else search.cheapest
    parts.patience.spend(look, lambda: search.best is not None)
    return _nothing(parts) if search.best is None else search.plan(search.best)


def _nothing(parts: PartsOfCluster) -> Plan:
    """The plan on all devices where nothing else was found: with stages that come and go, or
    because there was no time to look at fewer devices. Otherwise why there is none.

    Raises:
        PlanError: nothing fits, or nothing is so fast, as far as there was time to look.
    """
    timed = replaced(parts.request, objective="time", within_seconds=None)
    fastest = parts.plan_on_all(timed)
    within = parts.request.within_seconds or inf
    if fastest.step_seconds <= within:
        early = _seen_of_parts([len(parts.cluster.devices)]) if parts.patience.end else ""
        return replace(fastest, reason="; ".join(filter(None, (fastest.reason, early))))
    reached = fastest.step_seconds
    enough = max(float(f"{reached * 1.005:.3g}"), reached)  # not one that is rounded down
    verdict = f"no plan takes {format_seconds(within)} or less: the fastest"
    if parts.patience.end:
        spent = format_seconds(parts.patience.seconds_spent)
        verdict = (
            f"no plan that takes {format_seconds(within)} or less was found in {spent}: so far"
        )
        verdict += ", the fastest"
    raise PlanError(
        f"{verdict} on {count_of(len(parts.cluster.devices), 'device')} takes "
        f"{format_seconds(reached)}; allow that long (within_seconds={enough:.4g}, --within), or "
        "give it more devices"
    )


def _seen_of_parts(sizes: Iterable[int]) -> str:
    """What is known where there was no time to look at all parts of a cluster.

    Args:
        sizes: of those that have a plan.
    """
    numbers = ", ".join(map(str, sorted(sizes)))
    return (
        f"of parts of the cluster, those with {numbers} devices were looked at in time; others may "
        "be better"
    )


class _PartSearch:
    """The best part so far, and the others that were good for a plan.

    Args:
        parts: of which cluster, and for which request.
    """

    def __init__(self, parts: PartsOfCluster) -> None:
        self._parts, self._others = parts, list[Judged]()
        self._within = parts.request.within_seconds or inf
        self.best: Judged | None = None

    def fewest(self) -> None:
        """Look for the fewest devices that are fast enough."""
        count = len(self._parts.cluster.devices)
        if count <= _ALL_SIZES:
            next(filter(self._is_enough, range(1, count + 1)), None)
            return
        # More devices may stay idle, so whatever some are good for, more are, too.
        whole = self._parts.whole_hosts()
        place = bisect_left(whole, True, key=self._is_enough)
        if self.best is not None:
            fewer = range(
                whole[place - 1] + 1 if place else 1, min(self.best.num_devices, whole[place])
            )
            bisect_left(fewer, True, key=self._is_enough)

    def _is_enough(self, size: int) -> bool:
        """Whether some part of this size is good for a plan; the fastest is kept."""
        if self._is_over:
            return True
        judged = (self._parts.best(part, self._within) for part in self._parts.of_size(size))
        there = [each for each in judged if each is not None]
        if not there:
            return False
        self._others += there
        self.best = min(there, key=lambda each: (each.num_devices, each.chosen.seconds))
        return True

    @property
    def _is_over(self) -> bool:
        if self.best is None:
            return self._parts.patience.is_late and self._parts.num_missed > 0
        return self._parts.patience.is_over

    def cheapest(self) -> None:
        """Look for the devices whose step costs least."""
        for size in self._sizes():
            for part in self._parts.of_size(size):
                if self._is_over:
                    return
                limit = self._within
                if self.best is not None:
                    # As dear as the best so far, for all that is paid here.
                    least = self._spending(self.best).amount
                    limit = min(
                        limit, least / Spending.of(1.0, part.size, part.price_per_hour).amount
                    )
                judged = self._parts.best(part, limit)
                if judged is not None:
                    self._compare(self._dearer_left_out(judged))

    def _sizes(self) -> Iterator[int]:
        """How many devices to try: all of few; of many, those of one host and of whole hosts, by
        fractions and powers of two."""
        count, whole = len(self._parts.cluster.devices), self._parts.whole_hosts()
        few = set(range(1, min(count, max(whole[0], _ALL_SIZES)) + 1))
        numbers = {len(whole) // part for part in range(1, 9)} - {0}
        numbers |= {1 << power for power in range(len(whole).bit_length())}
        yield from sorted(few | {whole[number - 1] for number in numbers})

    def _dearer_left_out(self, judged: Judged) -> Judged:
        """With the cheapest of the plans that were simulated on a part."""
        fast = [
            contender
            for contender in judged.contenders
            if contender.seconds <= self._within and contender.setting.is_final
        ]
        choices = [judged._replace(chosen=contender) for contender in fast]
        return min(choices, key=lambda each: self._spending(each).amount, default=judged)

    def _compare(self, judged: Judged) -> None:
        self._others.append(judged)
        best = self.best
        if best is None or self._spending(judged).amount < self._spending(best).amount:
            self.best = judged

    def _spending(self, judged: Judged) -> Spending:
        task = judged.chosen.task
        devices = [d for index in judged.chosen.setting.devices for d in task.devices.behind(index)]
        price = sum(device.price_per_hour for device in devices)
        seconds, graph = judged.chosen.seconds, self._parts.graph.at(task.graph.microbatch_size)
        tokens = task.num_microbatches * tokens_of_graph(graph)
        return Spending.of(seconds, len(devices), price, tokens)

    def plan(self, best: Judged) -> Plan:
        """The plan of a part, with what the others were good for."""
        patience = self._parts.patience
        why = self._why(best, is_cut_short=patience.is_over)  # before the rest takes time as well
        plan = best.plan(best.rivals(patience))
        others = [other for other in self._others if other is not best]
        rows = [row for other in others for row in self._row(best, other)]
        return replace(
            plan,
            reason=f"{plan.reason}; {why}",
            alternatives=(*plan.alternatives, *rows),
        )

    def _row(self, best: Judged, other: Judged) -> Iterator[Alternative]:
        label = f"on {count_of(other.num_devices, 'device')}"
        for row in alternatives_of(best.chosen, {label: Rival(other.chosen)}, best.constraints):
            if row.label == label:
                yield row

    def _why(self, best: Judged, *, is_cut_short: bool) -> str:
        count, request = best.num_devices, self._parts.request
        if is_cut_short:
            return _seen_of_parts({other.num_devices for other in self._others} | {count})
        if request.objective == "cost":
            dear = sorted(
                (other for other in self._others if other is not best),
                key=lambda other: self._spending(other).amount,
            )
            words = f"{count_of(count, 'device')} cost least, {self._spending(best)}"
            if dear:
                words += (
                    f"; {dear[0].chosen} would cost {self._spending(dear[0])} and take "
                    f"{format_seconds(dear[0].chosen.seconds)}"
                )
            return words
        if count == 1:
            return "one device is enough"
        if request.within_seconds is None:
            return f"no plan that fits takes fewer devices than {count}"
        return f"no plan on fewer devices than {count} takes {format_seconds(self._within)} or less"
