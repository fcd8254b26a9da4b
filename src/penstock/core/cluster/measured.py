"""From timed messages to a ``Cluster``: fits of links, and ranks gathered by host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import NamedTuple

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.core.cluster.cluster import Cluster, Topology
from penstock.core.cluster.parts import Card, Device, DeviceKind, Group, Link, Wire

TYPICAL_BYTES = 2**20
"""A message by which links are compared."""

MOST_DIFFERENCE = 0.3
"""How far a pair may be from its group before it gets a wire of its own."""

Pair = tuple[int, int]


class Fit(NamedTuple):
    """A link, as far as latency + bytes ÷ bandwidth describes it.

    Attributes:
        link: fitted.
        error: difference to what was measured, as a share of it; the median of all sizes.
    """

    link: Link
    error: float


class Seat(NamedTuple):
    """Where a rank runs.

    Attributes:
        host: equal for ranks of one host, unlike for others; its name, then perhaps more words.
        kind: ``cpu`` or ``gpu``.
        memory_bytes: what its own device has; 0 where it shares the host's.
        host_memory_bytes: what the host's ranks share; 0 where nobody says.
    """

    host: str
    kind: DeviceKind
    memory_bytes: int
    host_memory_bytes: int

    @property
    def shared_bytes(self) -> int:
        """The memory that the host's ranks share; 0 where each has its own."""
        return 0 if self.memory_bytes else self.host_memory_bytes


def fit(num_bytes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """A link from the medians of timed messages.

    The bandwidth is the slope of the least-squares line, which large messages decide. The latency
    is the time of the smallest message, not the line's intercept: that one's error is many times a
    latency, and often negative, since buffers on the way let the first bytes pass sooner.

    Args:
        num_bytes: sizes, at least two different ones.
        seconds: one way, of each size.

    Raises:
        InputError: fewer than two sizes.
    """
    if len(set(num_bytes)) < 2 or len(num_bytes) != len(seconds):
        raise InputError("a link is fitted to the times of at least two sizes of message")
    middle, average = fmean(num_bytes), fmean(seconds)
    spread = sum((n - middle) ** 2 for n in num_bytes)
    slope = sum((n - middle) * (t - average) for n, t in zip(num_bytes, seconds, strict=True))
    per_byte = max(0.0, slope / spread)
    latency = min(zip(num_bytes, seconds, strict=True))[1]
    link = Link(latency_seconds=latency, bytes_per_second=1 / per_byte if per_byte else 0.0)
    times = zip(num_bytes, seconds, strict=True)
    return Fit(link, median(abs(link.seconds(n) - t) / t for n, t in times))


def ring_seconds(num_ranks: int, num_bytes: float, link: Link) -> float:
    """A ring all-reduce: 2(n − 1) messages one after another, of an n-th of the bytes each.

    Args:
        num_ranks: n.
        num_bytes: summed, on every rank.
        link: the slowest of the ring.
    """
    return 2 * (num_ranks - 1) * link.seconds(num_bytes / num_ranks)


def chosen_pairs(hosts: Sequence[str], most: int) -> list[Pair]:
    """Which pairs of ranks to measure.

    Args:
        hosts: the host of each rank.
        most: so many pairs are all measured; of more, the neighbours on each host, and of each two
            hosts that follow one another the first ranks.

    Returns:
        Pairs, the lower rank first.
    """
    everyone = list(combinations(range(len(hosts)), 2))
    if len(everyone) <= most:
        return everyone
    by_host = list(ranks_by_host(hosts).values())
    inside = {pair for ranks in by_host for pair in pairwise(ranks)}
    firsts = [ranks[0] for ranks in by_host]
    ring = [*pairwise(firsts), *([(firsts[0], firsts[-1])] if len(firsts) > 2 else [])]
    return sorted(inside | {(min(pair), max(pair)) for pair in ring})


def gathered(
    seats: Sequence[Seat], links: Mapping[Pair, Link], cards: Sequence[Sequence[int]] = ()
) -> Cluster:
    """The cluster in which some pairs were measured; device i is rank i's.

    Hosts become groups with the median of their pairs' links, the cluster's link is the median of
    those between hosts, and a pair gets a wire where a message of ``TYPICAL_BYTES`` takes over
    ``MOST_DIFFERENCE`` longer or shorter than that. Who shares a card is a group with it, the
    host or a part of it; the card is as fast as what was measured through it.

    Args:
        seats: where each rank is, and what it has there.
        links: the link of each pair of ranks, the lower rank first.
        cards: ranks that share one.
    """
    hosts = ranks_by_host([seat.host for seat in seats])
    titles = _titles(hosts)
    devices = _devices(seats, hosts, titles)
    inside = _inside(hosts, links)
    if len(hosts) == 1:
        (host,) = hosts
        plain = Cluster(devices=devices, link=inside[host], memory_bytes=seats[0].shared_bytes)
    else:
        host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
        between = _middle(link for (a, b), link in links.items() if host_of[a] != host_of[b])
        groups = tuple(
            Group(
                name=titles[host],
                members=tuple(devices[rank].name for rank in ranks),
                link=inside[host],
                memory_bytes=seats[ranks[0]].shared_bytes,
                kind="shared-memory" if seats[ranks[0]].kind == "cpu" else None,
            )
            for host, ranks in hosts.items()
            if len(ranks) > 1
        )
        plain = Cluster(devices=devices, link=between, groups=groups)
        plain = _with_cards(plain, hosts, [own for own in cards if len(own) > 1], links)
    topology = Topology(plain)
    wires = tuple(
        Wire(between=(devices[a].name, devices[b].name), link=link)
        for (a, b), link in links.items()
        if _differs(link, topology.link(a, b))
    )
    return replace(plain, wires=wires)


def _with_cards(
    cluster: Cluster,
    hosts: Mapping[str, Sequence[int]],
    cards: Sequence[Sequence[int]],
    links: Mapping[Pair, Link],
) -> Cluster:
    """A cluster of several hosts, with the cards that ranks share."""
    names = [device.name for device in cluster.devices]
    whole = {frozenset(ranks) for ranks in hosts.values()}
    groups = {group.members: group for group in cluster.groups}
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    between = {(a, b): link for (a, b), link in links.items() if host_of[a] != host_of[b]}
    parts = []
    for number, ranks in enumerate(cards):
        own = frozenset(ranks)
        through = [link for pair, link in between.items() if own & {*pair}]
        usual = _middle(through) if through else cluster.link
        if not usual.bytes_per_second:
            continue
        # The link between hosts has the latency, of both ends together.
        card = Card(bytes_per_second=usual.bytes_per_second)
        members = tuple(names[rank] for rank in ranks)
        if own in whole:
            groups[members] = replace(groups[members], card=card)
            continue
        host = next(group for group in cluster.groups if {*members} <= {*group.members})
        part = Group(
            name=f"{host.name}/card{number}",
            members=members,
            link=host.link,
            card=card,
            kind=host.kind,
        )
        parts.append(part)
        rest = tuple(name for name in groups[host.members].members if name not in members)
        groups[host.members] = replace(groups[host.members], members=(*rest, part.name))
    return replace(cluster, groups=(*groups.values(), *parts))


def ranks_by_host(hosts: Sequence[str]) -> dict[str, list[int]]:
    """The ranks on each host, from the host of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return ranks


def _titles(hosts: Iterable[str]) -> dict[str, str]:
    """A short name for each host; containers of one machine may all bear the same."""
    names = {host: host.split()[0] for host in hosts}
    counts = Counter(names.values())
    seen: Counter[str] = Counter()
    titles = {}
    for host, name in names.items():
        titles[host] = f"{name}-{seen[name]}" if counts[name] > 1 else name
        seen[name] += 1
    return titles


def _devices(
    seats: Sequence[Seat], hosts: Mapping[str, Sequence[int]], titles: Mapping[str, str]
) -> tuple[Device, ...]:
    devices = []
    for rank, seat in enumerate(seats):
        ranks = hosts[seat.host]
        index = ranks.index(rank)
        alone = len(ranks) == 1 and len(hosts) > 1
        memory_bytes = seat.memory_bytes or (seat.host_memory_bytes if alone else 0)
        if len(hosts) == 1:
            name = f"{seat.kind}{index}"
        else:
            name = titles[seat.host] if alone else f"{titles[seat.host]}:{index}"
        devices.append(Device(name=name, memory_bytes=memory_bytes, kind=seat.kind))
    return tuple(devices)


def _inside(hosts: Mapping[str, Sequence[int]], links: Mapping[Pair, Link]) -> dict[str, Link]:
    """The link within each host; where none was measured, that of the other hosts."""
    within = {
        host: [link for pair, link in links.items() if {*pair} <= {*ranks}]
        for host, ranks in hosts.items()
    }
    usual = _middle(link for inner in within.values() for link in inner)
    return {host: _middle(inner) if inner else usual for host, inner in within.items()}


def _middle(links: Iterable[Link]) -> Link:
    """The median latency and the median bandwidth; a link without cost of none."""
    measured = list(links)
    if not measured:
        return Link()
    return Link(
        latency_seconds=median(link.latency_seconds for link in measured),
        bytes_per_second=median(link.bytes_per_second for link in measured),
    )


def _differs(link: Link, usual: Link) -> bool:
    actual, expected = link.seconds(TYPICAL_BYTES), usual.seconds(TYPICAL_BYTES)
    return max(actual, expected) > (1 + MOST_DIFFERENCE) * min(actual, expected)


def differences(
    measured: Cluster, written: Cluster, links: Mapping[Pair, Link], where: str
) -> Iterator[str]:
    """The ways in which a cluster that was measured differs from the one that a file says, each a
    sentence with both figures: links whose typical message takes over ``MOST_DIFFERENCE`` longer or
    shorter, and who shares a card.

    Args:
        measured, written: whose device i is rank i's.
        links: those that were measured, the lower rank first.
        where: the name of the file.

    Raises:
        InputError: the file has another number of devices.
    """
    count = len(written.devices)
    if count != len(measured.devices):
        raise InputError(
            f"{where} has {count} devices, and {len(measured.devices)} ranks were measured; start "
            "one rank for each device of the file, in its order"
        )
    said, names = Topology(written), [device.name for device in written.devices]
    for pair, link in links.items():
        usual = said.link(*pair)
        if usual.bytes_per_second and _differs(link, usual):
            actual, expected = (each.seconds(TYPICAL_BYTES) * 1e3 for each in (link, usual))
            yield (
                f"a mebibyte from {names[pair[0]]} to {names[pair[1]]} takes {actual:.3g} ms, and "
                f"by {where} {expected:.3g} ms"
            )
    measured_cards, written_cards = Topology(measured).cards, said.cards
    for pair in combinations(range(count), 2):
        ways = [cards[pair[0]] == cards[pair[1]] >= 0 for cards in (measured_cards, written_cards)]
        if ways[0] != ways[1] and any(card >= 0 for card in measured_cards):
            both = f"{names[pair[0]]} and {names[pair[1]]}"
            words = "share a card" if ways[0] else "do not share a card"
            yield f"{both} {words}, unlike in {where}"
