"""Sums of copies on hosts: which ranks are near each other, and how long a sum takes by a tree.

At each level of a tree (``penstock.core.summation.tree``) k groups exchange what each has summed:
2(k−1)/k · M goes out of a group and as much comes in, which its devices share. Of a card goes out
what the groups behind it exchange with those that are not: with p groups behind it, in a flat sum
of devices that share it, p · 2(k−p)/k · M.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.core.cluster import Link, Topology
from penstock.core.summation.tree import SumTree

Levels = tuple[tuple[int, ...], ...]


class RankPlaces(NamedTuple):
    """Where the ranks of a plan are; nothing is said where none of them has a card.

    Attributes:
        cards: the card of each rank, numbered from 0; −1 of one that has none, or several.
        hosts: the host of each rank, numbered from 0; of a rank on several, a number of its own.
    """

    cards: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()

    @classmethod
    def on(
        cls, topology: Topology, devices: Sequence[int], straddling: Collection[int]
    ) -> RankPlaces:
        """The places of ranks on these devices.

        Args:
            straddling: those that stand for devices of several hosts.
        """
        cards = [-1 if device in straddling else topology.cards[device] for device in devices]
        if max(cards) < 0:
            return cls()
        hosts = [(topology.hosts[k], k if k in straddling else -1) for k in devices]
        number = {host: place for place, host in enumerate(dict.fromkeys(hosts))}
        there = dict.fromkeys(card for card in cards if card >= 0)
        card_number = {card: place for place, card in enumerate(there)}
        return cls(
            tuple(card_number.get(card, -1) for card in cards),
            tuple(number[host] for host in hosts),
        )

    def of(self, ranks: Sequence[int]) -> RankPlaces:
        """Those of some ranks."""
        return RankPlaces(*(tuple(own[rank] for rank in ranks) if own else () for own in self))


class LevelSeconds(NamedTuple):
    """How long the copies of a stage exchange at one level of their tree.

    Attributes:
        seconds: of their bytes on the slowest link or card.
        latency: of a message and its answer.
    """

    seconds: float
    latency: float


def levels_worth_trying(
    topology: Topology, devices: Sequence[int], straddling: Collection[int] = ()
) -> list[Levels]:
    """The ways to sum near ranks first: not at all, by the groups of each depth of the cluster's
    tree, and by all depths. Where nobody says which groups are hosts, by a card or the kind of
    their links, none are.

    Args:
        devices: of each rank.
        straddling: those that stand for devices of several hosts, and so are near nobody.
    """
    if max(topology.hosts[device] for device in devices) < 0:
        return [()]
    paths = [() if device in straddling else topology.paths[device] for device in devices]
    depths = [_numbers(paths, depth) for depth in range(max(map(len, paths), default=0))]
    divided = [numbers for numbers in depths if 1 < len({*numbers}) < len(devices)]
    choices: list[Levels] = [(), *((numbers,) for numbers in divided), tuple(divided[::-1])]
    return list(dict.fromkeys(choices))


def _numbers(paths: Sequence[Sequence[int]], depth: int) -> tuple[int, ...]:
    """The group that each rank is in at a depth, numbered from 0; alone where there is none."""
    groups = [path[depth] if depth < len(path) else -1 - k for k, path in enumerate(paths)]
    number = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    return tuple(number[group] for group in groups)


def level_seconds(
    topology: Topology, tree: SumTree, device_of: Mapping[int, int], num_bytes: float, width: int
) -> list[LevelSeconds]:
    """How long copies exchange at each level, innermost first.

    Args:
        device_of: the device of each holder.
        num_bytes: of the gradients on each device.
        width: tensor ranks of each holder that sum at the same time behind the same card.
    """
    return [
        _of_level(topology, tree, level, device_of, num_bytes, width)
        for level in range(tree.num_levels)
    ]


def _of_level(
    topology: Topology,
    tree: SumTree,
    level: int,
    device_of: Mapping[int, int],
    num_bytes: float,
    width: int,
) -> LevelSeconds:
    on_cards: dict[int, float] = {}
    longest, latency = 0.0, 0.0
    for group in tree.levels[level]:
        parts = [tree.owners_in(part) or part for part in tree.parts(level, group)]
        if len(parts) < 2:
            continue
        for card, passed in _card_bytes(topology, parts, device_of, width * num_bytes).items():
            on_cards[card] = on_cards.get(card, 0.0) + passed
        carried = 2 * (len(parts) - 1) / len(parts) * num_bytes / min(map(len, parts))
        # From each group one device: the links inside groups are another level's.
        firsts = [device_of[part[0]] for part in parts]
        link = topology.slowest_link(firsts, carried)
        longest = max(longest, link.seconds(carried) - link.latency_seconds)
        latency = max(latency, 2 * link.latency_seconds)
    through = (count / topology.card(card).bytes_per_second for card, count in on_cards.items())
    return LevelSeconds(max(longest, *through, 0.0), latency)


def _card_bytes(
    topology: Topology,
    parts: Sequence[Sequence[int]],
    device_of: Mapping[int, int],
    num_bytes: float,
) -> dict[int, float]:
    """Bytes that pass each card in one direction while groups exchange what they have: of what the
    devices of a group behind it carry, that which goes to groups on other hosts."""
    places = [[device_of[rank] for rank in part] for part in parts]
    on_host = [_shares(topology.hosts, part) for part in places]
    near: dict[int, float] = {}
    for own in on_host:
        for host, share in own.items():
            near[host] = near.get(host, 0.0) + share
    carried: dict[int, float] = {}
    for part, own in zip(places, on_host, strict=True):
        for card, share in _shares(topology.cards, part).items():
            if card >= 0:
                host = topology.hosts[next(k for k in part if topology.cards[k] == card)]
                others = len(parts) - 1 - (near[host] - own[host])
                carried[card] = carried.get(card, 0.0) + share * others
    return {card: 2 * num_bytes / len(parts) * amount for card, amount in carried.items()}


def links_of_groups(
    topology: Topology, groups: Sequence[Sequence[int]], num_bytes: float
) -> list[Link]:
    """The slowest link of each group of tensor ranks, for messages of so many bytes. Groups that
    straddle hosts exchange what they have at the same time, so they share the cards on their way.
    """
    straddling = [len({topology.hosts[device] for device in group}) > 1 for group in groups]
    passing = Counter(
        card
        for group, straddles in zip(groups, straddling, strict=True)
        for card in {topology.cards[device] for device in group}
        if straddles and card >= 0
    )
    links = []
    for group, straddles in zip(groups, straddling, strict=True):
        link = topology.slowest_link(group, num_bytes)
        sharers = max(passing[topology.cards[device]] for device in group) if straddles else 1
        rate = link.bytes_per_second / max(sharers, 1)
        links.append(Link(latency_seconds=link.latency_seconds, bytes_per_second=rate))
    return links


def _shares(numbers: Sequence[int], devices: Sequence[int]) -> dict[int, float]:
    """The share of some devices that has each number."""
    counts = Counter(numbers[device] for device in devices)
    return {number: count / len(devices) for number, count in counts.items()}
