"""``TreeRole``: one holder's part in a tree of sums, as the messages that it sends and awaits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.summation.tree import SumTree

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
