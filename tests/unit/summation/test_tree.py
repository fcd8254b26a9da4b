"""The tree in which holders of the same weights sum: shares, delegates, traffic, order."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InputError
from penstock.core.summation.tree import SumTree
from penstock.planning.plans.summing import Summing


@st.composite
def trees(draw):
    """Holders on hosts, perhaps behind switches, whatever their numbers."""
    switches = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    hosts = draw(st.lists(st.integers(0, 3), min_size=6, max_size=6))
    levels = [switches, [hosts[switch] for switch in switches]]
    ranks = draw(st.sets(st.integers(0, len(switches) - 1), min_size=1))
    owners = draw(st.one_of(st.none(), st.sets(st.sampled_from(sorted(ranks)), min_size=1)))
    return SumTree.of(sorted(ranks), levels, None if owners is None else sorted(owners))


@given(trees())
def test_everybodys_gradients_reach_every_owner_once(tree):
    for owner in tree.owners:
        held = {rank: Counter([rank]) for rank in tree.ranks}
        for level in range(tree.num_levels):
            for source, target, share in tree.steps(level):
                if share == owner:
                    held[target] = held[target] + held.pop(source)
        assert held == {owner: Counter(tree.ranks)}


@given(trees())
def test_owners_shares_make_the_whole(tree):
    assert sum(map(Fraction, tree.shares.values())) == pytest.approx(1)
    assert set(tree.shares) == set(tree.owners)


@given(trees())
def test_what_delegates_add_is_what_fold_adds(tree):
    """Every owner adds in the same order, which is the one that proofs replay."""
    values = {rank: str(rank) for rank in tree.ranks}
    for owner in tree.owners:
        held = dict(values)
        for level in range(tree.num_levels):
            made = {}
            for group in tree.levels[level]:
                target = tree.delegate(level, group[0], owner)
                first, *more = tree.sources(level, target, owner)
                total = held[first]
                for source in more:
                    total = f"({total}+{held[source]})"
                made[target] = total
            held = made
        assert held[owner] == tree.fold(values, "({}+{})".format)


@pytest.mark.parametrize(("hosts", "copies"), [(2, 4), (4, 2), (3, 1), (4, 8)])
def test_a_card_carries_what_hosts_exchange_and_no_more(hosts, copies):
    tree = SumTree.of(range(hosts * copies), [[rank // copies for rank in range(hosts * copies)]])
    sent = Counter()
    for source, target, owner in tree.steps(tree.num_levels - 1):
        sent[source // copies] += tree.shares[owner]
        sent[target // copies] += tree.shares[owner]  # the sum goes back
    for host in range(hosts):
        assert sent[host] == pytest.approx(2 * (hosts - 1) / hosts)


@pytest.mark.parametrize("hosts", [2, 3])
def test_devices_of_a_host_have_as_much_to_do(hosts):
    tree = SumTree.of(range(hosts * 4), [[rank // 4 for rank in range(hosts * 4)]])
    sent = Counter()
    for source, _, owner in tree.steps(1):
        sent[source] += tree.shares[owner]
    assert len({round(share, 9) for share in sent.values()}) == 1 and len(sent) == hosts * 4


def test_alone_on_their_hosts_holders_add_in_the_order_of_ranks():
    tree = SumTree.of([3, 1, 2], [[0, 1, 2, 3]])
    assert tree == SumTree.of([1, 2, 3])
    assert tree.fold({1: "a", 2: "b", 3: "c"}, "({}+{})".format) == "((a+b)+c)"


def test_hosts_count_in_the_order_of_their_first_ranks():
    tree = SumTree.of(range(4), [[1, 0, 1, 0]])
    assert tree.levels == (((0, 2), (1, 3)), ((0, 1, 2, 3),))


def test_the_first_of_each_host_may_own_all():
    summing = Summing(levels=((0, 0, 1, 1),), across="first")
    tree = summing.tree(range(4))
    assert tree.owners == (0, 2) and tree.shares == {0: 0.5, 2: 0.5}
    assert summing.tree([0, 1]).owners == (0, 1)


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (((0, 0, 1), (0, 1, 1)), "groups are made of whole groups"),
        (((0, 0, 1), (0, 1)), "each level gives the group of every rank"),
        (((-4, -4, -5),), "groups are numbered from 0"),
    ],
)
def test_levels_that_are_no_tree_are_refused(levels, words):
    with pytest.raises(InputError, match=words):
        Summing(levels=levels)
