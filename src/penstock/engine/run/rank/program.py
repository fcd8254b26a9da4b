"""A rank's part of a lowered schedule, with all that can be known before it runs.

What an op sends where, what its errors will say, and what a forward has to keep follow from the
schedule alone. It is looked up here once, not with every microbatch.

A unit is a microbatch or, where microbatches are sliced, one slice of it. Units are numbered
through, microbatch × number of slices + slice, so that one number names a message or a loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from penstock.core.schedule import Kind, Op
from penstock.core.schedule.op import BACKWARD, RECEIVES, RESIDENCE, SENDS, other_end
from penstock.core.schedule.residence import stays_of
from penstock.core.schedule.rounds import Segment
from penstock.engine.model.spine import NamedLayer
from penstock.engine.stage.protocol import Keep
from penstock.engine.transport import Edge
from penstock.engine.transport.base import SKIP_TAGS


class SkipRoute(NamedTuple):
    """A value that goes from one stage straight to a later one, beside the chain.

    Attributes:
        key: its name in the model.
        source, target: the stages that stash and recall it.
        number: tells the messages of this route from those of others.
    """

    key: str
    source: int
    target: int
    number: int


def skip_routes(layers_of: Iterable[Iterable[NamedLayer]]) -> tuple[SkipRoute, ...]:
    """The skips that cross from one stage to another.

    Args:
        layers_of: the layers of every stage.
    """
    source: dict[str, int] = {}
    routes: list[SkipRoute] = []
    for stage, layers in enumerate(layers_of):
        for layer in layers:
            for key in layer.recalls:
                if source[key] != stage:
                    routes.append(SkipRoute(key, source[key], stage, len(routes)))
            source.update(dict.fromkeys(layer.stashes, stage))
    return tuple(routes)


class SkipChannel(NamedTuple):
    """How a skip of one microbatch, or its gradient, gets from one stage to another.

    Attributes:
        route: between which stages.
        backward: whether it is the gradient.
        edge: on which it travels; ``None`` within a rank.
        waiting: what to say if it does not come.
    """

    route: SkipRoute
    backward: bool
    edge: Edge | None
    waiting: str = ""


class RankProgram:
    """One rank's ops for one minibatch, and all that follows from them.

    Args:
        segment: a part of a lowered schedule.
        skips: the model's values that travel beside the chain.

    Attributes:
        ops: this rank's, in order.
        last_stage: the number of the pipeline's last stage.
        num_slices: how many slices a microbatch has.
        keeps: what the forward of a (stage, unit) keeps for its backward.
        keeps_again: what its recomputation keeps.
        edges: the edge of every send and receive.
        waiting: for every receive, what to say if nothing comes.
        stays: what each fetch and leave is for.
        offloaded: (stage, unit) whose activations leave.
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
        self.stays = stays_of(self._all_ops) if RESIDENCE & schedule.kinds else {}
        self.offloaded = frozenset(
            (op.stage, self.unit(op)) for op in self._all_ops if op.kind is Kind.LEAVE_STASH
        )
        self.edges: dict[Op, Edge] = {}
        self.waiting: dict[Op, str] = {}
        for op in self._all_ops:
            self._route(op)
        self.stashes: dict[int, list[SkipRoute]] = defaultdict(list)
        self.recalls: dict[int, list[SkipRoute]] = defaultdict(list)
        for route in skips:
            self.stashes[route.source].append(route)
            self.recalls[route.target].append(route)

    @cached_property
    def last_leaves(self) -> frozenset[Op]:
        """The leaves with which gradients go out that are complete, and on which all ranks will
        agree."""
        if all(op.kind is not Kind.AGREE for op in self._all_ops):
            return frozenset()
        leaves = {op.stage: op for op in self._all_ops if op.kind is Kind.LEAVE_BACKWARD}
        return frozenset(leaves.values())

    def unit(self, op: Op) -> int:
        """The number of the microbatch, or of its slice, that an op works on; from the beginning
        of the segment's window."""
        return op.microbatch * self.num_slices + op.slice

    def _keeps(self) -> tuple[dict[tuple[int, int], Keep], dict[tuple[int, int], Keep]]:
        def units(kind: Kind) -> list[tuple[int, int]]:
            return [(op.stage, self.unit(op)) for op in self._all_ops if op.kind is kind]

        split, again = set(units(Kind.BACKWARD_INPUT)), set(units(Kind.RECOMPUTE))
        forwards = units(Kind.FORWARD)
        complete = {key: Keep.SPLIT if key in split else Keep.EVERYTHING for key in forwards}
        return {key: Keep.INPUT if key in again else complete[key] for key in forwards}, complete

    def _route(self, op: Op) -> None:
        if op.kind in SENDS:
            self.edges[op] = self._edge(op)
        elif op.kind in RECEIVES:
            needed = self.schedule.dependencies(op)[0]
            edge = self.edges[op] = self._edge(needed)
            self.waiting[op] = self._awaiting(op, f"{needed} of rank {edge.source}")
        elif op.kind is Kind.AGREE:
            self.waiting[op] = self._awaiting(op, "the norms of all ranks' gradients")

    def _edge(self, send: Op) -> Edge:
        """The edge on which a send op sends: forward and backward messages have tags of their own,
        since they may be awaited in any order."""
        where, backward = self.schedule.where, send.kind is Kind.SEND_BACKWARD
        return Edge(where[send], where[other_end(send)], 2 * send.stage + backward)

    def _awaiting(self, op: Op, awaited: str) -> str:
        """How an error names a wait."""
        return f"rank {self.rank}, waiting at {op} for {awaited}"

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

    def arriving(self, op: Op) -> tuple[SkipChannel, ...]:
        """Where the skips come from that a forward recalls; of a backward, the gradients of what
        its stage has stashed: that which is recalled last in the model comes first."""
        if op.kind in BACKWARD:
            return self._channels(op, reversed(self.stashes[op.stage]), backward=True)
        return self._channels(op, self.recalls[op.stage], backward=False)

    def leaving(self, op: Op) -> tuple[SkipChannel, ...]:
        """Where the skips go that a forward stashes; of a backward, the gradients of what its stage
        has recalled."""
        backward = op.kind in BACKWARD
        routes = self.recalls if backward else self.stashes
        return self._channels(op, routes[op.stage], backward=backward)

    def _channels(
        self, op: Op, routes: Iterable[SkipRoute], *, backward: bool
    ) -> tuple[SkipChannel, ...]:
        return tuple(self._channel(op, route, backward) for route in routes)

    def _channel(self, op: Op, route: SkipRoute, backward: bool) -> SkipChannel:
        edge = self.skip_edge(route, op.microbatch, backward=backward)
        if edge is None or edge.source == self.rank:
            return SkipChannel(route, backward, edge)
        kind = "the gradient of skip" if backward else "skip"
        waiting = self._awaiting(op, f"{kind} {route.key!r} of rank {edge.source}")
        return SkipChannel(route, backward, edge, waiting)

    def first_units(self) -> dict[Edge, int]:
        """The unit of the first message on every edge of the chain on which this rank sends."""
        units: dict[Edge, int] = {}
        for op in self.ops:
            if op.kind in SENDS:
                units.setdefault(self.edges[op], self.unit(op))
        return units

    def outgoing(self) -> set[Edge]:
        """The edges on which others may wait for this rank's values and gradients."""
        edges = {self.edges[op] for op in self._all_ops if op.kind in SENDS}
        for op in self._all_ops:
            if op.kind is Kind.FORWARD:
                for routes, backward in ((self.stashes, False), (self.recalls, True)):
                    channels = self._channels(op, routes[op.stage], backward=backward)
                    edges |= {channel.edge for channel in channels if channel.edge is not None}
        return edges
