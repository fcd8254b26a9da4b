"""What travels between ranks: messages and sums of copies, and what they pass on their way.

A link between two ranks carries one message at a time. A card that several ranks share carries one
thing in each direction, be it a message or a part of a sum; whichever comes first goes first. (Real
cards carry several at once, each more slowly: the last of them is through at the same moment.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.core.schedule.columns import Columns, Longs
from penstock.core.schedule.needs import Numbers
from penstock.core.schedule.op import RELEASING, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs, Exchange
from penstock.core.timing.simulator.passage import Event, Floats
from penstock.core.timing.spans import Transfer, TransferKind


class Roads:
    """What messages and sums pass between ranks, each thing by the moment from which it is free:
    links between two ranks, both directions of cards that ranks share, and what a rank has for
    itself.

    Args:
        cards, hosts: as ``Costs`` has them.
    """

    def __init__(self, cards: Sequence[int], hosts: Sequence[int]) -> None:
        self._cards, self._hosts = cards, hosts
        self._free: dict[Hashable, float] = {}

    def ends(self, source: int, target: int) -> list[Hashable]:
        """The directions of cards that a message passes; none inside a host."""
        if not self._cards or self._hosts[source] == self._hosts[target]:
            return []
        sides = (("out", self._cards[source]), ("in", self._cards[target]))
        return [side for side in sides if side[1] >= 0]

    def of_sum(self, ranks: Sequence[int]) -> list[Hashable]:
        """What a part of a sum of some ranks passes first."""
        cards = {self._cards[rank] for rank in ranks} - {-1} if self._cards else set()
        if not cards or len({self._hosts[rank] for rank in ranks}) < 2:
            return [("links", rank) for rank in ranks]
        return [(side, card) for card in sorted(cards) for side in ("out", "in")]

    def take(self, roads: Sequence[Hashable], since: float, seconds: float) -> tuple[float, float]:
        """Keep roads busy that must all be free, as early as can be; gives from when to when."""
        start = max([since, *(self._free.get(road, 0.0) for road in roads)])
        until = start + seconds
        self._free.update(dict.fromkeys(roads, until))
        return start, until


@dataclass
class _SumOfCopies:
    """The sum of a stage's copies before an update.

    Attributes:
        exchange: how its parts travel.
        stage: whose gradients.
        ranks: that hold it.
        number: of the first of its events; one for each part follows.
        num_copies: that hand in.
        left: ops with which they have still to do so.
        made: by copy that has begun its last backward, when all its parts but the last are made.
        there: when the sum is; ``None`` until its last part has gone.
    """

    exchange: Exchange
    stage: int
    ranks: tuple[int, ...]
    number: int
    num_copies: int
    left: set[Op]
    made: list[list[float]] = field(default_factory=list)
    there: float | None = None


class Sums:
    """The exchanges of all stages that have copies.

    A part can be summed when the last copy has made it (``Exchange.made``), during its last
    backward or W. What several sums pass takes parts as they come.

    Args:
        schedule: with the ops that hand in gradients.
        costs: how long exchanges take.
        roads: what parts pass.

    Attributes:
        transfers: what passes the first thing, as far as it is known.
    """

    def __init__(self, schedule: Schedule, costs: Costs, roads: Roads) -> None:
        self._schedule, self._costs, self._roads = schedule, costs, roads
        self._of_update: dict[Op, _SumOfCopies] = {}
        self._of_copy: dict[Op, _SumOfCopies] = {}
        self._makes: dict[Op, list[Op]] = {}
        self._makers: dict[Op, list[Op]] = {}
        self._begun: dict[Op, tuple[float, float]] = {}
        self._events: list[tuple[_SumOfCopies, int]] = []
        self.transfers: list[Transfer] = []
        updates = schedule.columns.ops(np.flatnonzero(schedule.columns.are_of({Kind.UPDATE})))
        known: dict[frozenset[Op], _SumOfCopies] = {}
        for update in updates:
            exchange = costs.exchange(update.stage)
            handed = frozenset() if exchange is None else self._handed_for(update)
            # Weights that are tied to other stages' are summed in one, when all are there.
            alone = {op.stage for op in handed} == {update.stage}
            if exchange is not None and alone and len(handed) > 1:
                if handed not in known:
                    known[handed] = self._sum_of(handed, exchange)
                self._of_update[update] = known[handed]

    def _handed_for(self, update: Op) -> frozenset[Op]:
        """The ops with which all copies hand in what an update waits for."""
        needed = self._schedule.dependencies(update)
        return frozenset(op for op in needed if op.kind is Kind.REDUCE)

    def _sum_of(self, handed: frozenset[Op], exchange: Exchange) -> _SumOfCopies:
        stage = min(handed).stage
        ranks = tuple(sorted({self._schedule.where[op] for op in handed}))
        total = _SumOfCopies(exchange, stage, ranks, len(self._events), len(handed), {*handed})
        self._events += [(total, part) for part in range(exchange.num_parts)]
        for op in handed:
            self._of_copy[op] = total
            self._makers[op] = [
                need for need in self._schedule.dependencies(op) if need.kind in RELEASING
            ]
            for maker in self._makers[op]:
                self._makes.setdefault(maker, []).append(op)
        return total

    def begun(self, op: Op, start: float, end: float) -> Iterator[Event]:
        """An op has begun; if a copy hands in what it makes, its parts leave meanwhile."""
        if op not in self._makes:
            return
        self._begun[op] = start, end
        for handing in self._makes[op]:
            if all(maker in self._begun for maker in self._makers[handing]):
                yield from self._made(handing)

    def _made(self, handing: Op) -> Iterator[Event]:
        """A copy's last backward has begun: of the last copy, tell when its parts are there."""
        spans = (self._begun[op] for op in self._makers[handing])
        total = self._of_copy[handing]
        return self._made_at(total, total.exchange.made(*max(spans, key=lambda span: span[1])))

    def _made_at(self, total: _SumOfCopies, times: list[float]) -> Iterator[Event]:
        total.made.append(times)
        if len(total.made) == total.num_copies:
            for part, of_copies in enumerate(zip(*total.made, strict=True)):
                yield max(of_copies), total.number + part

    def handed_in(self, op: Op, end: float) -> Iterator[Event]:
        """An op has ended; with the last copy's last part the sum leaves."""
        total = self._of_copy.get(op)
        if total is None:
            return
        last = total.exchange.num_parts - 1
        if not self._makers[op]:
            yield from self._made_at(total, [end] * last)
        total.left.discard(op)
        if not total.left:
            yield end, total.number + last

    def pass_part(self, number: int, time: float) -> None:
        """A part leaves, and passes one thing after another."""
        total, part = self._events[number]
        exchange, now = total.exchange, time
        for place, seconds in enumerate(exchange.seconds):
            own = [("place", place, rank) for rank in total.ranks]  # a pair would be a link
            roads = own if place else self._roads.of_sum(total.ranks)
            start, now = self._roads.take(roads, now, seconds)
            if not place:
                self.transfers.append(Transfer(total.ranks, "sum", total.stage, part, start, now))
        if part == exchange.num_parts - 1:
            total.there = now + exchange.once

    def in_parts(self, op: Op) -> bool:
        """Whether an op waits for a sum that is exchanged in parts."""
        return op in self._of_update

    def there(self, update: Op) -> float:
        """When the sum for an update is there."""
        total = self._of_update.get(update)
        if total is None:
            return 0.0
        assert total.there is not None, "an update comes behind all that hand in"
        return total.there


@dataclass(frozen=True)
class CrossingResults:
    """Ops whose results go to other ranks as messages, and over which links.

    Attributes:
        ops: their numbers, ascending.
        readers: for each of them, the op on another rank that gets its result.
        links: for every op of the schedule, the number of the link that its result goes over, which
            joins two ranks in one direction; −1 where it stays.
        num_links: how many there are.
    """

    ops: Longs
    readers: Longs
    links: Longs
    num_links: int

    @classmethod
    def of(cls, columns: Columns) -> CrossingResults:
        """The messages of a schedule's ops, worked out once."""
        kept = vars(columns)  # as ``needs_of`` keeps what it finds
        if "messages" not in kept:
            kept["messages"] = cls._of(columns)
        messages: CrossingResults = kept["messages"]
        return messages

    @classmethod
    def _of(cls, columns: Columns) -> CrossingResults:
        reader = np.full(columns.count, -1, np.int64)
        for kind, ops, needs in Numbers(columns).rule():
            for need in needs if kind is not Kind.UPDATE else ():  # sums go another way
                there = need < columns.count
                crosses = there & (columns.rank[np.where(there, need, 0)] != columns.rank[ops])
                np.maximum.at(reader, need[crosses], ops[crosses])
        sent = np.flatnonzero(reader >= 0)
        pairs = columns.rank[sent].astype(np.int64) * columns.num_ranks
        pairs += columns.rank[reader[sent]]
        different, numbers = np.unique(pairs, return_inverse=True)
        links = np.full(columns.count, -1, np.int64)
        links[sent] = numbers
        return cls(sent, reader[sent], links, len(different))

    def occupied(self, columns: Columns, costs: Costs) -> Floats:
        """How long the result of each op keeps its link busy; 0 where it stays."""
        # The last stage has no link behind it, and its costs may have no number for one.
        edges = [costs.occupies(edge) for edge in range(columns.num_stages - 1)]
        busy = np.zeros(columns.count)
        ends = columns.stage[self.ops], columns.stage[self.readers]
        busy[self.ops] = np.array([*edges, 0.0])[np.minimum(*ends)]
        return busy


class Links:
    """When each message begins its way, where links and cards carry one at a time.

    Args:
        columns: the ops whose results are messages.
        costs: how long these keep what they pass busy.
        roads: what they pass.

    Attributes:
        transfers: what kept links busy so far.
    """

    def __init__(self, columns: Columns, costs: Costs, roads: Roads) -> None:
        self._roads, messages = roads, CrossingResults.of(columns)
        self._busy = messages.occupied(columns, costs).tolist()
        numbers = zip(messages.ops.tolist(), messages.readers.tolist(), strict=True)
        self._reader = dict(numbers)
        fields = columns.rank, columns.stage, columns.microbatch
        self._rank, self._stage, self._microbatch = (each.tolist() for each in fields)
        self.transfers: list[Transfer] = []

    def send(self, number: int, end: float) -> float:
        """Put the result of an op on its way, if another rank gets it; gives when."""
        reader = self._reader.get(number)
        if reader is None:
            return end
        link = self._rank[number], self._rank[reader]
        stage, target = self._stage[number], self._stage[reader]
        roads = [link, *self._roads.ends(*link)]
        left, until = self._roads.take(roads, end, self._busy[number])
        kind: TransferKind = "gradient" if target < stage else "value"
        self.transfers.append(Transfer(link, kind, stage, self._microbatch[number], left, until))
        return left


def transfers_of(columns: Columns, sent: Floats, busy: Floats) -> tuple[Transfer, ...]:
    """The messages of ops whose results left at ``sent``, and kept their links busy so long."""
    messages = CrossingResults.of(columns)
    ops, readers = messages.ops, messages.readers
    ranks = zip(columns.rank[ops].tolist(), columns.rank[readers].tolist(), strict=True)
    backwards = columns.stage[readers] < columns.stage[ops]
    kinds: Iterator[TransferKind] = ("gradient" if back else "value" for back in backwards)
    fields = columns.stage[ops], columns.microbatch[ops], sent[ops], sent[ops] + busy[ops]
    rows = zip(ranks, kinds, *(field.tolist() for field in fields), strict=True)
    return tuple(sorted(Transfer(*row) for row in rows))
