"""``what_if``: plan again for other hardware, and show what that changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as replaced
from math import inf
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.base.errors import InputError, PlanError
from penstock.base.lazily import method_loaded_when_used
from penstock.base.telling import Telling
from penstock.base.units import (
    count_of,
    format_bytes,
    format_seconds,
    to_bytes,
    to_bytes_per_second,
    to_seconds,
)
from penstock.base.values import MOST_AMOUNT, expect, whole
from penstock.core.cluster import Card, Cluster, Device, Link
from penstock.core.cluster.cluster import only
from penstock.core.cluster.parts import MOST_DEVICES
from penstock.core.graph import LayerGraph
from penstock.planning.planner.objective import hosts_of
from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.request import PlanRequest
from penstock.planning.planner.search import planned
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.spending import spending_of
from penstock.planning.plans.table import WIDTH, as_text, family_title, new_table

_CHANGE = re.compile(r"\s*(?P<quantity>[a-z]+)\s*(?P<how>[*/=+-])\s*(?P<value>[^\s,]+)\s*")


class _Question(NamedTuple):
    """A request, and the cluster that it is about."""

    cluster: Cluster
    request: PlanRequest


@dataclass(frozen=True)
class Change:
    """One change, as in ``bandwidth*2``.

    Attributes:
        quantity: what is changed.
        how: ``*``, ``/``, ``+``, ``-`` or ``=``.
        value: by how much, or to what.
    """

    quantity: str
    how: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Change:
        """Read one change.

        Raises:
            InputError: it is none, or is about something that cannot be changed.
        """
        match = _CHANGE.fullmatch(text)
        if match is None or match["quantity"] not in _QUANTITIES:
            raise InputError(
                f"{text.strip()!r} is no change; write for example bandwidth*2 or hosts+1, of "
                f"{', '.join(_QUANTITIES)}"
            )
        return cls(match["quantity"], match["how"], match["value"])

    def of(
        self,
        number: float,
        read: Callable[[object], float] | None = None,
        *,
        unlimited: bool = False,
    ) -> float:
        """The number that this change makes of ``number``.

        Args:
            number: what there is.
            read: of a value with a unit.
            unlimited: whether 0 means that there is no limit.

        Raises:
            InputError: the value is no finite number > 0.
        """
        try:
            value = read(self.value) if read and self.how in "=+-" else float(self.value)
        except ValueError:
            unit = " with a unit" if read and self.how in "=+-" else ""
            raise InputError(f"{self.quantity}: {self.value!r} is not a number{unit}") from None
        if not 0 < value < inf:
            raise InputError(f"{self.quantity}: {self.value} must be > 0 and finite")
        if unlimited and not number and self.how in "+-":
            return 0.0
        changed = {
            "*": number * value,
            "/": number / value,
            "+": number + value,
            "-": number - value,
            "=": value,
        }[self.how]
        if changed <= 0 < number:
            raise InputError(f"{self.quantity}{self.how}{self.value} leaves nothing")
        if changed > MOST_AMOUNT:
            raise InputError(
                f"{self.quantity}{self.how}{self.value} makes it too large; ask for less"
            )
        return changed


@dataclass(frozen=True)
class WhatIf:
    """A plan, and what would be planned instead.

    Attributes:
        changes: in words.
        before, after: the plans.
        ends: when the search for each was stopped, in words; empty where it came to its end.
    """

    changes: str
    before: Plan
    after: Plan
    ends: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH) -> str:
        """Both plans for people, in lines of at most ``width`` columns."""
        table = new_table()
        for name in ("", "now", f"with {self.changes}", ""):
            table.add_column(name)
        for name, before, after, change in self.rows():
            table.add_row(name, before, after, change)
        return as_text(table, width)

    _repr_html_ = method_loaded_when_used("penstock.planning.plans.picture", "what_if_cell")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, before, after, difference) of everything that people compare."""
        before, after = self.before, self.after
        seconds = before.step_seconds, after.step_seconds
        most = max(before.rank_bytes), max(after.rank_bytes)
        marks = before.estimate, after.estimate
        return [
            ("plan", _summary(before), _summary(after), ""),
            ("layers", _layers(before), _layers(after), ""),
            (
                "step",
                format_seconds(seconds[0]),
                format_seconds(seconds[1]),
                f"{seconds[0] / seconds[1]:.2f}× as fast" if seconds[1] else "",
            ),
            (
                "memory of a rank",
                format_bytes(most[0]),
                format_bytes(most[1]),
                f"{most[1] / most[0]:.0%}" if most[0] else "",
            ),
            ("recompute", _recomputing(before), _recomputing(after), ""),
            *([("figures", marks[0].mark, marks[1].mark, "")] if marks[0] and marks[1] else []),
            *self._cost(),
            *self._searches(),
        ]

    def _searches(self) -> Iterator[tuple[str, str, str, str]]:
        """When the searches ended, if one was cut short."""
        first, second = (f"stopped {end}" if end else "to its end" for end in self.ends)
        if any(self.ends):
            yield "search", first, second, ""

    def _cost(self) -> Iterator[tuple[str, str, str, str]]:
        """What a step costs, where that changes."""
        costs = spending_of(self.before), spending_of(self.after)
        if costs[0].in_money and costs[1].in_money and costs[0].amount:
            change = f"{costs[1].amount / costs[0].amount:.0%}"
            yield "cost", str(costs[0]), str(costs[1]), change


def what_if(
    changes: str, graph: LayerGraph, cluster: Cluster | None = None, **request: Any
) -> WhatIf:
    """Plan now and with changes.

    Args:
        changes: as in ``"bandwidth*2, hosts+1"``; of bandwidth, latency, memory (limits of devices
            and of ``memory_bytes``), speed, devices (the first of the cluster, or more like them),
            hosts (the first, or more like the last) and microbatches; ``*``, ``/``, ``+``, ``-`` or
            ``=``, with units behind the last three.
        graph: the profiled model.
        cluster: devices; by default this machine's cores.
        request: what else ``plan`` can be asked; both plans have ``patience_seconds``. If the
            search for the first is interrupted (Ctrl-C), that for the second gets as long as it
            had; if the second is, what it has found is compared.

    Raises:
        InputError: no such change, or it would change nothing.
        PlanError: there is no plan before or after.
    """
    expect(changes, str, "the changes", "write them as text, as in 'bandwidth*2, memory/2'")
    question = _Question(cluster or Cluster.local(), PlanRequest(**request))
    changed = question
    for part in filter(str.strip, changes.split(",")):
        change = Change.parse(part)
        changed = _QUANTITIES[change.quantity](changed, change)
    if changed == question:
        raise InputError(
            f"{changes!r} changes nothing: what it changes has no limit here; give it one, as in "
            "bandwidth=10Gbit/s or memory=16GiB"
        )
    with Telling("planning") as telling:
        patience = PlanningPatience(question.request.patience_seconds, telling.update)
        before, end = planned(graph, *question, patience), patience.end
        patience = patience.for_comparison
        patience.about = f"with {changes}: ".__str__
        try:
            after = planned(graph, *changed, patience)
        except PlanError as error:
            raise PlanError(f"with {changes}: {error}") from None
    return WhatIf(changes, before, after, (end, patience.end))


def _summary(plan: Plan) -> str:
    replicas = plan.replicas if max(plan.replicas) > 1 else ()
    stages, ranks = count_of(len(plan.stages), "stage"), count_of(plan.num_ranks, "rank")
    return f"{family_title(plan.schedule, replicas, plan.versions)}, {stages} on {ranks}"


def _layers(plan: Plan) -> str:
    return "-".join(str(len(stage.layers)) for stage in plan.stages)


def _recomputing(plan: Plan) -> str:
    stages = [str(index) for index, stage in enumerate(plan.stages) if stage.recompute != "none"]
    return f"stages {', '.join(stages)}" if stages else "none"


def _with_links(question: _Question, change: Callable[[Link], Link]) -> _Question:
    cluster = question.cluster
    groups = tuple(
        replace(
            group, link=change(group.link), card=group.card and Card.of(change(group.card.link))
        )
        for group in cluster.groups
    )
    wires = tuple(replace(wire, link=change(wire.link)) for wire in cluster.wires)
    changed = replace(cluster, link=change(cluster.link), groups=groups, wires=wires)
    return question._replace(cluster=changed)


def _bandwidth(question: _Question, change: Change) -> _Question:
    def faster(link: Link) -> Link:
        bandwidth = change.of(link.bytes_per_second, to_bytes_per_second, unlimited=True)
        return replace(link, bytes_per_second=bandwidth)

    return _with_links(question, faster)


def _latency(question: _Question, change: Change) -> _Question:
    def later(link: Link) -> Link:
        return replace(link, latency_seconds=change.of(link.latency_seconds, to_seconds))

    return _with_links(question, later)


def _memory(question: _Question, change: Change) -> _Question:
    def limit(num_bytes: int) -> int:
        changed = change.of(num_bytes, to_bytes, unlimited=True)
        # No bytes at all would mean that there is no limit.
        return max(1, round(changed)) if changed else 0

    cluster, request = question
    devices = tuple(
        replace(device, memory_bytes=limit(device.memory_bytes)) for device in cluster.devices
    )
    groups = tuple(
        replace(group, memory_bytes=limit(group.memory_bytes)) if group.memory_bytes else group
        for group in cluster.groups
    )
    shared = limit(cluster.memory_bytes) if cluster.memory_bytes else 0
    if request.memory_bytes:
        request = replaced(request, memory_bytes=limit(request.memory_bytes))
    changed = replace(cluster, devices=devices, groups=groups, memory_bytes=shared)
    return _Question(changed, request)


def _speed(question: _Question, change: Change) -> _Question:
    devices = tuple(
        replace(device, speed=change.of(device.speed)) for device in question.cluster.devices
    )
    return question._replace(cluster=replace(question.cluster, devices=devices))


def _devices(question: _Question, change: Change) -> _Question:
    devices = question.cluster.devices
    wanted = change.of(len(devices))
    count = _whole(change, wanted, len(devices))
    if count <= len(devices):
        return question._replace(cluster=only(question.cluster, range(count)))
    more: tuple[Device, ...] = tuple(
        replace(devices[index % len(devices)], name=f"more{index}")
        for index in range(len(devices), count)
    )
    return question._replace(cluster=replace(question.cluster, devices=(*devices, *more)))


def _whole(change: Change, wanted: float, number: int) -> int:
    if round(wanted) < 1:
        raise InputError(f"{change.quantity}{change.how}{change.value} leaves none of {number}")
    return whole(change.quantity, round(wanted), 1, MOST_DEVICES)


def _hosts(question: _Question, change: Change) -> _Question:
    cluster = question.cluster
    hosts = hosts_of(cluster)
    count = _whole(change, change.of(len(hosts)), len(hosts))
    if count <= len(hosts):
        kept = [device for host in hosts[:count] for device in host]
        return question._replace(cluster=only(cluster, kept))
    whole("devices", len(cluster.devices) + (count - len(hosts)) * len(hosts[-1]), 1, MOST_DEVICES)
    last = only(cluster, hosts[-1])
    for number in range(len(hosts), count):
        cluster = _joined(cluster, last, f"more{number}")
    return question._replace(cluster=cluster)


def _joined(cluster: Cluster, host: Cluster, name: str) -> Cluster:
    """A cluster with one more host beside its outermost groups.

    Args:
        name: which stands before all names in the new host.
    """

    def named(part: str) -> str:
        return f"{name}:{part}"

    devices = (replace(device, name=named(device.name)) for device in host.devices)
    groups = [
        replace(group, name=named(group.name), members=tuple(map(named, group.members)))
        for group in host.groups
    ]
    wires = [replace(w, between=(named(w.between[0]), named(w.between[1]))) for w in host.wires]
    return replace(
        cluster,
        devices=(*cluster.devices, *devices),
        groups=(*cluster.groups, *groups),
        wires=(*cluster.wires, *wires),
    )


def _microbatches(question: _Question, change: Change) -> _Question:
    count = question.request.microbatches
    if count is None:
        raise InputError("microbatches can be changed only where their number is given")
    changed = replaced(question.request, microbatches=round(change.of(count)))
    return question._replace(request=changed)


_QUANTITIES: dict[str, Callable[[_Question, Change], _Question]] = {
    "bandwidth": _bandwidth,
    "latency": _latency,
    "memory": _memory,
    "speed": _speed,
    "hosts": _hosts,
    "devices": _devices,
    "microbatches": _microbatches,
}
