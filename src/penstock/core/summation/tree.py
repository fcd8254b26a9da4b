"""``SumTree``: who adds what to what, where some holders of the same weights are near each other.

Devices of one host share its network card, so gradients are summed inside each host first, and only
partial sums travel. With H hosts of M bytes, 2(H−1)/H · M crosses a card in each direction, however
many devices stand behind it.

1. Every element has an owner, which makes its sum. In every other group (a host, or a switch in it)
   the element has a delegate, which makes the group's partial sum. Owners have equal shares, and
   their delegates follow from their own place, so each device has as much to do as any other.
2. A holder hands its gradients to the delegates of its innermost group; these add in the order of
   the ranks, and hand partial sums to the delegates of the group around, and so on up to the owner.
   Groups count in the order of their first ranks.
3. Sums, and weights that an owner has updated, go the same ways back.

Where every holder is a group of its own, this is what owners do without a tree, with the same bits.
Hierarchies of this kind are old; Jiang et al., "A Unified Architecture for Accelerating Distributed
DNN Training" (BytePS), OSDI'20, section 4.2, has the one of machines with PCIe switches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import TypeVar

T = TypeVar("T")

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SumTree:
    """The tree of the holders of the same weights.

    Attributes:
        levels: from the innermost groups to the one of all holders; each level divides all holders
            into groups of ascending ranks, which are made of groups of the level before.
        owners: those that sum for all; by default every holder does.
    """

    levels: tuple[Groups, ...]
    owners: tuple[int, ...]

    @classmethod
    def of(
        cls,
        ranks: Sequence[int],
        levels: Sequence[Sequence[int]] = (),
        owners: Sequence[int] | None = None,
    ) -> SumTree:
        """The tree of some ranks.

        >>> tree = SumTree.of([0, 1, 2, 3], [[0, 0, 1, 1]])
        >>> tree.levels
        (((0, 1), (2, 3)), ((0, 1, 2, 3),))

        Args:
            ranks: those that hold the weights.
            levels: the number of each rank's group, innermost level first; a rank behind the last
                number, as a parameter server, is a group of its own.
            owners: those of the ranks that sum; by default all.
        """
        ascending = sorted(ranks)
        divisions: list[Groups] = []
        before: Groups = tuple((rank,) for rank in ascending)
        for numbers in levels:
            groups: dict[int, list[int]] = {}
            for rank in ascending:
                number = numbers[rank] if rank < len(numbers) else -1 - rank
                groups.setdefault(number, []).append(rank)
            level = tuple(tuple(group) for group in groups.values())
            if level != before and len(level) > 1:  # else it says nothing of these ranks
                divisions.append(level)
                before = level
        divisions.append((tuple(ascending),))
        return cls(tuple(divisions), tuple(ascending if owners is None else owners))

    @property
    def num_levels(self) -> int:
        """How often partial sums are added up: 1 where all holders are alike."""
        return len(self.levels)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All holders, ascending."""
        return self.levels[-1][0]

    def group(self, level: int, rank: int) -> tuple[int, ...]:
        """The group of a level that has a rank; level −1 is the rank itself."""
        return (
            next(group for group in self.levels[level] if rank in group) if level >= 0 else (rank,)
        )

    @cached_property
    def shares(self) -> dict[int, float]:
        """The share of the whole that each owner sums: groups of a level have equal ones, so that
        cards have, too, whatever stands behind them."""
        whole = sum(self.weights.values())
        return {owner: weight / whole for owner, weight in self.weights.items()}

    @cached_property
    def weights(self) -> dict[int, int]:
        """The shares as whole numbers, as small as they can be: 1 of each where all are equal."""
        fractions = dict.fromkeys(self.owners, 1)
        for level in reversed(range(self.num_levels)):
            for group in self.levels[level]:
                parts = [part for part in self.parts(level, group) if self.owners_in(part)]
                for part in parts:
                    for owner in self.owners_in(part):
                        fractions[owner] *= len(parts)
        common = lcm(*fractions.values())
        return {owner: common // fraction for owner, fraction in fractions.items()}

    def owners_in(self, group: Sequence[int]) -> list[int]:
        """The owners among some ranks."""
        return [rank for rank in group if rank in self._owner_set]

    @cached_property
    def _owner_set(self) -> frozenset[int]:
        return frozenset(self.owners)

    def parts(self, level: int, group: tuple[int, ...]) -> Groups:
        """The groups of the level before that a group is made of."""
        if not level:
            return tuple((rank,) for rank in group)
        inside = frozenset(group)
        return tuple(part for part in self.levels[level - 1] if part[0] in inside)

    def delegate(self, level: int, rank: int, owner: int) -> int:
        """Who makes the partial sum of an owner's share in a group of a level.

        >>> tree = SumTree.of(range(4), [[0, 0, 1, 1]])
        >>> [tree.delegate(0, 2, owner) for owner in tree.owners]
        [2, 3, 2, 3]

        Args:
            level: −1 is the rank by itself.
            rank: any of the group.
            owner: whose share.
        """
        return self._delegates[owner][level + 1][rank]

    @cached_property
    def _delegates(self) -> dict[int, list[dict[int, int]]]:
        """By owner, and by level from −1: the delegate of each rank's group."""
        return {owner: self._of_owner(owner) for owner in self.owners}

    def _of_owner(self, owner: int) -> list[dict[int, int]]:
        rows = [dict.fromkeys(self.ranks, owner)]
        for level in reversed(range(self.num_levels)):
            row: dict[int, int] = {}
            for group in self.levels[level]:
                above = rows[0][group[0]]
                for part in self.parts(level, group):
                    row |= dict.fromkeys(part, self._delegate_in(level - 1, part, above))
            rows.insert(0, row)
        return rows

    def _delegate_in(self, level: int, group: tuple[int, ...], above: int) -> int:
        """The delegate of a group for those that the delegate of the group around answers for."""
        if above in group:
            return above
        able = self.owners_in(group) or list(group)
        alike = self.group(level, above)
        place = (self.owners_in(alike) or list(alike)).index(above) if level >= 0 else 0
        if alike == (above,) and above in self.owners:  # as parameter servers, which are all first
            place = self.owners.index(above)
        return able[place % len(able)]

    def sources(self, level: int, rank: int, owner: int) -> tuple[int, ...]:
        """Whose partial sums a group's delegate adds up, in this order; itself among them.

        Args:
            level: of the group.
            rank: any of it.
            owner: whose share is added up.
        """
        parts = self.parts(level, self.group(level, rank))
        return tuple(self.delegate(level - 1, part[0], owner) for part in parts)

    def steps(self, level: int) -> Iterator[tuple[int, int, int]]:
        """(from, to, owner) of everything that goes up at a level; sums go the other way."""
        for owner in self.owners:
            for group in self.levels[level]:
                target = self.delegate(level, group[0], owner)
                for source in self.sources(level, target, owner):
                    if source != target:
                        yield source, target, owner

    def fold(self, values: Mapping[int, T], add: Callable[[T, T], T]) -> T:
        """Add what all holders have in the order of the tree, which is that of every owner.

        >>> SumTree.of(range(4), [[0, 0, 1, 1]]).fold(dict(enumerate("abcd")), "({}+{})".format)
        '((a+b)+(c+d))'

        Args:
            values: by rank; those that are not there are left out.
            add: of a sum and the next one.
        """
        there = [rank for rank in self.ranks if rank in values]
        sums: dict[tuple[int, ...], T] = {(rank,): values[rank] for rank in there}
        for level, groups in enumerate(self.levels):
            folded: dict[tuple[int, ...], T] = {}
            for group in groups:
                parts = [sums[part] for part in self.parts(level, group) if part in sums]
                for index, part in enumerate(parts):
                    folded[group] = part if not index else add(folded[group], part)
            sums = folded
        return sums[self.ranks]


Owners = tuple[int, ...]


@dataclass(frozen=True)
class TreeRole:
    """One holder's part in a tree.

    Two holders have to do with each other at one level only: that of the innermost group which has
    both. So all that goes from one to the other of a bucket is one message.

    Attributes:
        targets: by level, to whom it hands partial sums, and of which owners' shares. Sums, or
            updated weights, of these shares come back from there.
        sources: by level, who hands it partial sums, and of which owners' shares.
        additions: by level, of each owner's share that it adds up there, whose partial sums these
            are, in their order; its own are among them.
    """

    targets: tuple[Mapping[int, Owners], ...]
    sources: tuple[Mapping[int, Owners], ...]
    additions: tuple[Mapping[int, Owners], ...]

    @classmethod
    def of(cls, tree: SumTree, rank: int) -> TreeRole:
        """The part of a rank.

        >>> role = TreeRole.of(SumTree.of(range(4), [[0, 0, 1, 1]]), 0)
        >>> role.targets
        ({1: (1, 3)}, {2: (2,)})
        >>> role.sources
        ({1: (0, 2)}, {2: (0,)})
        """
        place = tree.ranks.index(rank)
        # Beginning behind itself: where all send in this order, none gets everybody's at once.
        others = tree.ranks[place + 1 :] + tree.ranks[:place]
        targets, sources, additions = [], [], []
        for level in range(tree.num_levels):
            held = [owner for owner in tree.owners if tree.delegate(level - 1, rank, owner) == rank]
            above = {owner: tree.delegate(level, rank, owner) for owner in held}
            added = {
                owner: tree.sources(level, rank, owner) for owner in held if above[owner] == rank
            }
            targets.append(_by_peer(others, {owner: (above[owner],) for owner in held}))
            sources.append(_by_peer(others, added))
            additions.append(added)
        return cls(tuple(targets), tuple(sources), tuple(additions))

    @property
    def num_levels(self) -> int:
        """Those of the tree."""
        return len(self.targets)


def _by_peer(others: Owners, peers: Mapping[int, Owners]) -> dict[int, Owners]:
    """The owners for whose shares each of the others is a peer, if it is one for any."""
    return {
        other: owners
        for other in others
        if (owners := tuple(owner for owner, own in peers.items() if other in own))
    }
