"""Sums of flat buffers inside each host, before and after those between hosts.

Devices of a host share its network card, and memory. With L devices on the host that has fewest,
gradients are cut into L equal slices: the j-th device of every host exchanges slice j with those of
the other hosts, and so the card carries each number once, whatever stands behind it. Devices beyond
the first L, and all for slices that are not theirs, hand gradients to a device of their own host:

1. A buffer leaves in portions, each as soon as its gradients are there; a slice is made of the
   same part of every portion, so that all devices have something to sum from the first one on.
2. Who sums a slice for a host adds in the order of the tree (``penstock.core.summation.tree``): the
   ranks of a switch by their number, then the switches; hosts come last, where they exchange.
3. Sums go the same ways back, those that the next forward needs first before the others.

Where devices have PCIe only, BytePS (Jiang et al., OSDI'20, section 4.2) does it so: inside a
switch, then to the CPU and the network. Values are added where the parameters are, and are in main
memory between hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.core.summation.split import MOST_PORTIONS
from penstock.core.summation.tree import Groups, SumTree, TreeRole
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.reduce.reducer import Purpose, SharedWeights
from penstock.engine.transport import Edge, Transport
from penstock.planning.plans.summing import Summing

Range = tuple[int, int]


class Hosts(NamedTuple):
    """The hosts on which holders of the same weights are.

    Attributes:
        groups: the ranks of each, ascending; in the order of the first ones.
        num_slices: in how many slices gradients pass between hosts at once.
    """

    groups: Groups
    num_slices: int

    @classmethod
    def of(cls, summing: Summing, ranks: Sequence[int]) -> Hosts:
        """Those of a plan; without levels, every rank is a host of its own.

        >>> summing = Summing(levels=((0, 0, 0, 1, 1),))
        >>> Hosts.of(summing, range(5))
        Hosts(groups=((0, 1, 2), (3, 4)), num_slices=2)

        Args:
            summing: the plan's.
            ranks: the holders.
        """
        groups: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            groups.setdefault(_host_number(summing, rank), []).append(rank)
        fewest = 1 if summing.across == "first" else min(map(len, groups.values()))
        return cls(tuple(map(tuple, groups.values())), fewest)

    def host_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the host of one."""
        return next(group for group in self.groups if rank in group)

    def slice_of(self, rank: int) -> int | None:
        """The slice that a rank exchanges with other hosts; ``None`` if it does not."""
        place = self.host_of(rank).index(rank)
        return place if place < self.num_slices else None

    def exchanging(self, slice_: int) -> tuple[int, ...]:
        """The ranks that exchange a slice, in the order of the hosts."""
        return tuple(group[slice_] for group in self.groups)

    def exchanging_of(self, team: Sequence[int]) -> list[tuple[int, ...]]:
        """By slice, those that exchange it of some processes, one for each rank in its order."""
        places = {rank: place for place, rank in enumerate(sorted(chain(*self.groups)))}
        return [
            tuple(team[places[rank]] for rank in self.exchanging(slice_))
            for slice_ in range(self.num_slices)
        ]


def _host_number(summing: Summing, rank: int) -> int:
    numbers = summing.levels[-1] if summing.levels else ()
    return numbers[rank] if rank < len(numbers) else -1 - rank


def sharing_cards(summing: Summing, sums: Sequence[Hosts]) -> Summing:
    """A plan's, in which each exchange counts on its share of what it passes: of a server that of
    all exchanges, of a host's card that of those that the host takes part in.

    Args:
        summing: the plan's.
        sums: the hosts of each sum.
    """
    if not sums:
        return summing
    total = sum(hosts.num_slices for hosts in sums)
    servers = tuple(
        replace(server, bytes_per_second=server.bytes_per_second / total)
        for server in summing.servers
    )
    if not summing.levels:
        return replace(summing, servers=servers)
    per_host: Counter[int] = Counter()
    for hosts in sums:
        for group in hosts.groups:
            per_host[_host_number(summing, group[0])] += hosts.num_slices
    rates = tuple(
        rate / max(per_host[_host_number(summing, rank)], 1)
        for rank, rate in enumerate(summing.bytes_per_second)
    )
    return replace(summing, servers=servers, bytes_per_second=rates)


class SliceLayout:
    """Where the portions and slices of flat buffers lie.

    Args:
        counts: numbers in the buffer of each type, where there are any.
        num_slices: see ``Hosts``.
        num_portions: how many leave one after another.
    """

    def __init__(self, counts: Mapping[int, int], num_slices: int, num_portions: int) -> None:
        self.num_portions, self.num_slices = num_portions, num_slices
        self._borders = {
            dtype: [count * index // num_portions for index in range(num_portions + 1)]
            for dtype, count in counts.items()
            if count
        }

    def portion(self, portion: int) -> dict[int, Range]:
        """The numbers of a portion, by their type."""
        return {
            dtype: (borders[portion], borders[portion + 1])
            for dtype, borders in self._borders.items()
        }

    def slice(self, portion: int, slice_: int) -> dict[int, Range]:
        """The numbers of a slice of a portion, by their type."""
        return {
            dtype: (
                start + (stop - start) * slice_ // self.num_slices,
                start + (stop - start) * (slice_ + 1) // self.num_slices,
            )
            for dtype, (start, stop) in self.portion(portion).items()
        }

    def in_slice(self, portion: int, slice_: int) -> dict[int, Range]:
        """The same numbers, counted from the beginning of the slice."""
        return {dtype: places[portion] for dtype, places in self._places[slice_].items()}

    @cached_property
    def _places(self) -> list[dict[int, list[Range]]]:
        """By slice and type, from where to where the part of each portion reaches."""
        places: list[dict[int, list[Range]]] = []
        for slice_ in range(self.num_slices):
            own: dict[int, list[Range]] = {}
            for dtype in self._borders:
                ranges = [self.slice(p, slice_)[dtype] for p in range(self.num_portions)]
                ends = [*accumulate((stop - start for start, stop in ranges), initial=0)]
                own[dtype] = [*pairwise(ends)]
            places.append(own)
        return places

    def counts(self, slice_: int) -> dict[int, int]:
        """How many numbers a slice has, by their type; without those of which it has none."""
        return {dtype: own[-1][1] for dtype, own in self._places[slice_].items() if own[-1][1]}


Made = Callable[[int, Sequence[Tensor]], None]
"""Takes a portion's number, and the sums of this rank's slice of it, by their type."""


class HostSums:
    """One rank's part in sums inside its host.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.
        hosts: on which the holders are.
        levels: groups inside the host, innermost first, as ``Summing`` has them.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        hosts: Hosts,
        levels: Sequence[Sequence[int]],
    ) -> None:
        host = hosts.host_of(rank)
        self._rank, self._shared, self._transport = rank, shared, transport
        self._summing = host[: hosts.num_slices]
        self._role = TreeRole.of(SumTree.of(host, levels, self._summing), rank)
        self._levels = range(self._role.num_levels)
        self._number = 0
        self._layout = SliceLayout({}, 1, 1)
        self._whole: Mapping[int, Tensor] = {}
        # By portion and by who sums a slice for the host: what this rank has of it.
        self._held: dict[tuple[int, int], list[Tensor]] = {}
        self._reached: dict[int, int] = {}

    def begin(self, number: int, layout: SliceLayout, whole: Mapping[int, Tensor]) -> None:
        """A round begins.

        Args:
            number: tells its messages from others.
            layout: of the buffers.
            whole: this rank's gradients by type, where sums will be, too.
        """
        self._number, self._layout, self._whole = number, layout, whole
        self._held.clear()
        self._reached.clear()

    def give(self, portion: int) -> None:
        """A portion of this rank's gradients is there."""
        for owner in self._summing:
            self._held[portion, owner] = self._cut(portion, owner)
        self._reach(portion, 0)

    def has_given(self, portion: int) -> bool:
        """Whether a portion has been given in this round."""
        return portion in self._reached

    def _cut(self, portion: int, owner: int) -> list[Tensor]:
        """The slice of a portion that one rank sums for the host."""
        ranges = self._layout.slice(portion, self._summing.index(owner))
        return [self._whole[dtype][start:stop] for dtype, (start, stop) in ranges.items()]

    def _edge(self, source: int, target: int, purpose: Purpose, portion: int) -> Edge:
        # Lane 0 has what holders tell each other of the whole round.
        return self._shared.edge(source, target, purpose, 1 + portion)

    def _reach(self, portion: int, level: int) -> None:
        """A portion's sums of the levels below one are made: hand those on that others add."""
        self._reached[portion] = level
        if level == len(self._levels):
            return
        for target, owners in self._role.targets[level].items():
            values = [value for owner in owners for value in self._held.pop((portion, owner))]
            edge = self._edge(self._rank, target, Purpose.PART, portion)
            self._transport.send(edge, self._number, values)

    def add_what_has_come(self, made: Made) -> None:
        """Add what others have given so far; waits for nobody."""
        for portion in sorted(self._reached):
            while (level := self._reached[portion]) < len(self._levels):
                # All are asked for, so that a transport looks for all.
                edges = self._arriving(level, portion)
                come = [self._transport.has_come(edge, self._number) for edge in edges]
                if not all(come):
                    break
                self._add(portion, level, made)

    def _arriving(self, level: int, portion: int) -> list[Edge]:
        sources = self._role.sources[level]
        return [self._edge(source, self._rank, Purpose.PART, portion) for source in sources]

    def complete(self, made: Made) -> None:
        """Add all that others of this host give in the round, all of whom have given, or will
        whatever this rank does."""
        for portion in range(self._layout.num_portions):
            while (level := self._reached[portion]) < len(self._levels):
                self._add(portion, level, made)

    def _add(self, portion: int, level: int, made: Made) -> None:
        come: dict[int, dict[int, list[Tensor]]] = {}
        for source, owners in self._role.sources[level].items():
            waiting = (
                f"rank {self._rank}, waiting before its update for rank {source}'s gradients of "
                "weights that both hold"
            )
            edge = self._edge(source, self._rank, Purpose.PART, portion)
            values = self._transport.recv(edge, self._number, waiting)
            come[source] = self._by_owner(portion, owners, values)
        for owner, sources in self._role.additions[level].items():
            own = self._held[portion, owner]
            columns = [own if rank == self._rank else come[rank][owner] for rank in sources]
            self._held[portion, owner] = [_added(parts) for parts in zip(*columns, strict=True)]
        self._reach(portion, level + 1)
        if level + 1 == len(self._levels) and self._rank in self._summing:
            made(portion, self._held.pop((portion, self._rank)))

    def _by_owner(
        self, portion: int, owners: Sequence[int], values: Sequence[Tensor]
    ) -> dict[int, list[Tensor]]:
        each = len(self._layout.portion(portion))
        return {
            owner: [*values[index * each : (index + 1) * each]]
            for index, owner in enumerate(owners)
        }

    def spread(self, portion: int) -> None:
        """Make a portion of the buffers the sums, of which this rank's slice has been written."""
        for level in reversed(self._levels):
            for source, owners in self._role.sources[level].items():
                edge = self._edge(self._rank, source, Purpose.SUM, portion)
                values = [value for owner in owners for value in self._cut(portion, owner)]
                self._transport.send(edge, self._number, [_leaving(value) for value in values])
            for target, owners in self._role.targets[level].items():
                waiting = (
                    f"rank {self._rank}, waiting before its update for rank {target}'s sum of "
                    "gradients of weights that both hold"
                )
                edge = self._edge(target, self._rank, Purpose.SUM, portion)
                sums = self._transport.recv(edge, self._number, waiting)
                for owner, own in self._by_owner(portion, owners, sums).items():
                    for room, value in zip(self._cut(portion, owner), own, strict=True):
                        room.copy_(value)

    def outgoing(self) -> set[Edge]:
        """The channels on which others may wait for this rank."""
        ways = ((Purpose.PART, self._role.targets), (Purpose.SUM, self._role.sources))
        return {
            self._edge(self._rank, other, purpose, portion)
            for purpose, by_level in ways
            for others in by_level
            for other in others
            for portion in range(MOST_PORTIONS)
        }


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum, in this order; of one part, that."""
    if len(parts) == 1:
        return parts[0]
    total = torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


def _leaving(value: Tensor) -> Tensor:
    """A sum that leaves: what leaves an accelerator does so later, when the next round may have
    written over it."""
    return value if is_on_host(value.device) else value.clone()
