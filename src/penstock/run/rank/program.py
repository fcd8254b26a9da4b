"""A rank's part of a lowered schedule, with all that can be known before it runs.

What an op sends where, what its errors will say, and what a forward has to keep follow from the
schedule alone. It is looked up here once, not with every microbatch.

A unit is a microbatch or, where microbatches are sliced, one slice of it. Units are numbered
through, microbatch × number of slices + slice, so that one number names a message or a loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedule import Kind, Op
from penstock.schedule.segment import Segment
from penstock.stage.stage import Keep
from penstock.transport import Edge
from penstock.transport.tags import SKIP_TAGS

_SENDS = {
    Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1, 0),
    Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1, 1),
}


class SkipRoute(NamedTuple):
    """A value that goes from one stage straight to a later one, beside the chain.

    Attributes:
        key: its name in the model.
        source, target: the stages that stash and recall it.
        number: of the route, which tells its messages from others.
    """

    key: str
    source: int
    target: int
    number: int


class Program:
    """What one rank does for one minibatch.

    Args:
        segment: of a lowered schedule.
        rank: which.
        skips: of the model.

    Attributes:
        ops: in order.
        num_slices: of a microbatch.
        keeps: what the forward of a (stage, unit) keeps for its backward.
        keeps_again: likewise what its recomputation keeps.
        edges: of every send and receive.
        waiting: of every receive, what to say if nothing comes.
        stashes, recalls: the skip routes that begin and end at a stage, in the order in which the
            model recalls them.
    """

    def __init__(self, segment: Segment, rank: int, skips: Sequence[SkipRoute] = ()) -> None:
        self.segment = segment
        self.schedule = schedule = segment.schedule
        self.rank = rank
        self.ops = segment.ranks[rank]
        # What is forwarded here may go back in a later segment, and others may wait for that.
        self._all_ops = schedule.ranks[rank]
        self.last_stage = schedule.num_stages - 1
        self.num_slices = schedule.num_slices
        self.keeps, self.keeps_again = self._keeps()
        self.edges: dict[Op, Edge] = {}
        self.waiting: dict[Op, str] = {}
        for op in self._all_ops:
            self._route(op)
        self.stashes: dict[int, list[SkipRoute]] = defaultdict(list)
        self.recalls: dict[int, list[SkipRoute]] = defaultdict(list)
        for route in skips:
            self.stashes[route.source].append(route)
            self.recalls[route.target].append(route)

    def unit(self, op: Op) -> int:
        """The number of the microbatch, or of its slice, that an op works on; from the beginning
        of the segment's window."""
        return op.microbatch * self.num_slices + op.slice

    def _keeps(self) -> tuple[dict[tuple[int, int], Keep], dict[tuple[int, int], Keep]]:
        def units(kind: Kind) -> list[tuple[int, int]]:
            return [(op.stage, self.unit(op)) for op in self._all_ops if op.kind is kind]

        split, again = set(units(Kind.BACKWARD_INPUT)), set(units(Kind.RECOMPUTE))
        forwards = units(Kind.FORWARD)
        complete = {one: Keep.SPLIT if one in split else Keep.EVERYTHING for one in forwards}
        return {one: Keep.INPUT if one in again else complete[one] for one in forwards}, complete

    def _route(self, op: Op) -> None:
        if op.kind in _SENDS:
            self.edges[op] = self._edge(op)
        elif op.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            needed = self.schedule.dependencies(op)[0]
            edge = self.edges[op] = self._edge(needed)
            self.waiting[op] = self.awaiting(op, f"{needed} of rank {edge.source}")
        elif op.kind is Kind.AGREE:
            self.waiting[op] = self.awaiting(op, "the norms of all ranks' gradients")

    def _edge(self, send: Op) -> Edge:
        """The edge on which a send op sends: forward and backward messages have tags of their own,
        since they may be awaited in any order."""
        kind, ahead, backward = _SENDS[send.kind]
        target = send._replace(stage=send.stage + ahead, kind=kind)
        where = self.schedule.where
        return Edge(where[send], where[target], 2 * send.stage + backward)

    def awaiting(self, op: Op, what: str) -> str:
        """How an error names a wait."""
        return f"rank {self.rank}, waiting at {op} for {what}"

    def skip_edge(self, route: SkipRoute, microbatch: int, *, backward: bool) -> Edge | None:
        """The edge on which a skip, or its gradient, travels; ``None`` within a rank."""
        source, target = (
            self.schedule.where[Op(stage, Kind.FORWARD, microbatch)]
            for stage in (route.source, route.target)
        )
        if source == target:
            return None
        tag = SKIP_TAGS + 2 * route.number + backward
        return Edge(target, source, tag) if backward else Edge(source, target, tag)

    def first_units(self) -> dict[Edge, int]:
        """The unit of the first message on every edge of the chain on which this rank sends."""
        units: dict[Edge, int] = {}
        for op in self.ops:
            if op.kind in _SENDS:
                units.setdefault(self.edges[op], self.unit(op))
        return units

    def outgoing(self) -> set[Edge]:
        """The edges on which others may wait for this rank's values and gradients."""
        found = {self.edges[op] for op in self._all_ops if op.kind in _SENDS}
        forwards = [op for op in self._all_ops if op.kind is Kind.FORWARD]
        for op in forwards:
            for routes, backward in ((self.stashes, False), (self.recalls, True)):
                edges = (
                    self.skip_edge(r, op.microbatch, backward=backward) for r in routes[op.stage]
                )
                found.update(edge for edge in edges if edge is not None)
        return found
