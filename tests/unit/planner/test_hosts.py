"""Sums of copies on hosts whose devices share a card: closed forms, the simulator, and the plan."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from penstock.core.cluster import Topology
from penstock.core.summation.tree import SumTree
from penstock.planning.planner.hosts import level_seconds, levels_worth_trying, links_of_groups

RATE = 12.5e6
INSIDE = pk.Link(bytes_per_second=1e12)


def hosts(*counts, rate=RATE):
    names = [
        [f"h{number}:{index}" for index in range(count)] for number, count in enumerate(counts)
    ]
    return pk.Cluster(
        devices=tuple(pk.Device(name=name) for own in names for name in own),
        groups=tuple(
            pk.Group(
                name=f"h{number}",
                members=tuple(own),
                link=INSIDE,
                card=pk.Card(bytes_per_second=rate),
            )
            for number, own in enumerate(names)
        ),
    )


def model(parameter_bytes=14.2e6, num_layers=4, seconds=0.05, output_bytes=40_000):
    each = seconds / num_layers
    return pk.LayerGraph(
        layers=tuple(
            pk.Layer(
                name=f"layer{index}",
                forward_seconds=each,
                backward_input_seconds=each,
                backward_weight_seconds=each,
                parameter_bytes=int(parameter_bytes / num_layers),
                output_bytes=output_bytes,
                activation_bytes=output_bytes,
            )
            for index in range(num_layers)
        ),
        microbatch_size=8,
    )


def through_cards(cluster, tree, num_bytes):
    """Seconds of the busiest direction of a card, message by message."""
    cards, busiest = Topology(cluster).cards, []
    for level in range(tree.num_levels):
        passed = Counter()
        for source, target, owner in tree.steps(level):
            for start, end in ((source, target), (target, source)):  # up, and the sum back
                if cards[start] != cards[end]:
                    passed["out", cards[start]] += tree.shares[owner] * num_bytes
                    passed["in", cards[end]] += tree.shares[owner] * num_bytes
        busiest.append(max(passed.values(), default=0.0) / RATE)
    return busiest


@given(
    num_hosts=st.integers(2, 5), copies=st.integers(1, 4), flat=st.booleans(), first=st.booleans()
)
def test_the_closed_form_is_what_messages_add_up_to(num_hosts, copies, flat, first):
    cluster = hosts(*[copies] * num_hosts)
    ranks = range(num_hosts * copies)
    owners = range(0, len(ranks), copies) if first and not flat else None
    tree = SumTree.of(ranks, [] if flat else [[rank // copies for rank in ranks]], owners)
    levels = level_seconds(Topology(cluster), tree, dict(enumerate(ranks)), 1e6, 1)
    exact = through_cards(cluster, tree, 1e6)
    assert levels[-1].seconds == pytest.approx(exact[-1])
    assert all(level.seconds < 1e-4 for level in levels[:-1]), "inside, nobody passes a card"


@pytest.mark.parametrize(
    ("counts", "flat", "in_levels"),
    [((4, 4), 4.0, 1.0), ((2, 2), 2.0, 1.0), ((2, 2, 2, 2), 3.0, 1.5), ((8,) * 4, 12.0, 1.5)],
)
def test_figures_of_flat_sums_and_of_hosts(counts, flat, in_levels):
    """In units of all gradients through a card: REFERENCE, "Hosts", has 12 M for four of eight."""
    cluster, ranks = hosts(*counts), range(sum(counts))
    topology, places = Topology(cluster), dict(enumerate(range(sum(counts))))
    (by_hosts,) = levels_worth_trying(topology, ranks)[1:]
    unit = 1e6 / RATE

    def seconds(levels):
        return level_seconds(topology, SumTree.of(ranks, levels), places, 1e6, 1)[-1].seconds

    assert seconds(()) == pytest.approx(flat * unit)
    assert seconds(by_hosts) == pytest.approx(in_levels * unit)


def test_members_of_tensor_groups_share_the_card():
    cluster, tree = hosts(1, 1), SumTree.of([0, 1])
    one, two = (
        level_seconds(Topology(cluster), tree, {0: 0, 1: 1}, 1e6, width)[0].seconds
        for width in (1, 2)
    )
    assert two == 2 * one


@pytest.mark.parametrize("reducer", ["owners", "sharded", "all-reduce"])
def test_copies_on_hosts_sum_inside_first(reducer):
    plan = pk.plan(
        model(), hosts(4, 4), microbatches=16, schedule="1f1b", replicas=[8], reducer=reducer
    )
    assert plan.summing.levels == ((0, 0, 0, 0, 1, 1, 1, 1),)
    assert plan.cards == (0, 0, 0, 0, 1, 1, 1, 1)
    bound = 14.2e6 / RATE
    assert bound < plan.prediction.step_seconds < 1.2 * bound + 16 / 8 * 0.15
    assert pk.Plan.from_json(plan.to_json()) == plan


def test_alone_on_their_hosts_copies_sum_in_the_order_of_ranks():
    plan = pk.plan(model(), hosts(1, 1, 1), microbatches=6, schedule="1f1b", replicas=[3])
    assert plan.summing.levels == () and plan.cards == (0, 1, 2)


def test_where_nobody_names_a_card_nothing_is_shared():
    cluster = pk.Cluster.tree((2, 2), (INSIDE, pk.Link(bytes_per_second=RATE)))
    plan = pk.plan(model(), cluster, microbatches=8, schedule="1f1b", replicas=[4])
    assert plan.cards == ()


def test_copies_are_placed_so_that_sums_stay_on_hosts():
    graph = model(parameter_bytes=200e6)
    heavy = pk.plan(graph, hosts(2, 2), microbatches=16, replicas=[2, 2])
    assert heavy.cards == (0, 0, 1, 1), "each stage on one host: no sum passes a card"


def test_pipelines_stay_on_hosts_where_outputs_weigh_more():
    cluster, graph = hosts(2, 2), model(parameter_bytes=4e3, output_bytes=4_000_000)
    plan = pk.plan(graph, cluster, microbatches=16, replicas=[2, 2])
    assert plan.cards == (0, 1, 0, 1), "each pipeline on one host: no output passes a card"


def costs(**changes):
    return pk.Costs(hop=3.0, link=3.0, **changes)


def test_messages_that_leave_a_host_at_once_take_turns():
    """Two pipelines of two ranks, whose first ranks share a card: F F | hop, and F F."""
    schedule = pk.schedules.build("1f1b", num_ranks=4, num_microbatches=2, replicas=[2, 2])
    own = pk.simulate(schedule, costs())
    shared = pk.simulate(schedule, costs(cards=[0, 0, 1, 1]))
    moved = [part for part in shared.transfers if part.kind == "value"]
    assert [(part.start, part.end) for part in moved] == [(1.0, 4.0), (4.0, 7.0)]
    assert shared.makespan > own.makespan
    inside = pk.simulate(schedule, costs(cards=[0, 0, 0, 0]))
    assert inside.makespan == own.makespan


@settings(deadline=None)
@given(
    family=st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v"]),
    num_ranks=st.integers(2, 4),
    data=st.data(),
)
def test_no_card_carries_two_things_at_once_and_sharing_never_helps(family, num_ranks, data):
    cards = data.draw(st.lists(st.integers(-1, 2), min_size=num_ranks, max_size=num_ranks))
    schedule = pk.schedules.build(family, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
    busy = data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    plain = pk.Costs(hop=busy + 0.25, link=busy)
    timeline = pk.simulate(schedule, pk.Costs(hop=busy + 0.25, link=busy, cards=cards))
    lanes = {}
    for part in timeline.transfers:
        source, target = part.ranks
        if cards[source] != cards[target]:
            for lane in (("out", cards[source]), ("in", cards[target])):
                if lane[1] >= 0:
                    lanes.setdefault(lane, []).append((part.start, part.end))
    for spans in lanes.values():
        spans.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
    assert timeline.makespan >= pk.simulate(schedule, plain).makespan - 1e-9


def test_sums_of_two_stages_share_the_cards_of_their_hosts():
    """Each stage has a copy on each host: both sums pass the same two cards."""
    from penstock.core.schedule.lower import add_update
    from penstock.core.timing.costs import Exchange

    schedule = add_update(
        pk.schedules.build("1f1b", num_ranks=4, num_microbatches=4, replicas=[2, 2])
    )
    exchanges = [Exchange(2, (5.0,))] * 2
    own = pk.simulate(schedule, pk.Costs(exchanges=exchanges))
    shared = pk.simulate(schedule, pk.Costs(exchanges=exchanges, cards=[0, 1, 0, 1]))
    parts = sorted((part.start, part.end) for part in shared.transfers)
    assert all(first[1] <= second[0] for first, second in pairwise(parts))
    assert shared.makespan > own.makespan


def test_costs_name_a_card_for_every_rank():
    schedule = pk.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(pk.InputError, match="cards has 3 numbers, but the schedule has 2 ranks"):
        pk.simulate(schedule, pk.Costs(cards=[0, 0, 1]))
    with pytest.raises(pk.InputError, match="cards"):
        pk.Costs(cards=[-2])


def test_plans_name_a_card_for_every_rank():
    plan = pk.plan(model(), hosts(1, 1), microbatches=4, schedule="1f1b", replicas=[2])
    with pytest.raises(pk.InputError, match="cards are"):
        plan.edited(cards=(0,))


def test_devices_with_cards_of_their_own_use_them_side_by_side():
    names = [[f"h{number}:{index}" for index in range(4)] for number in range(2)]
    card = pk.Card(bytes_per_second=RATE)
    groups = [
        pk.Group(name=f"{name}/card", members=(name,), card=card) for own in names for name in own
    ] + [
        pk.Group(
            name=f"h{number}",
            members=tuple(f"{name}/card" for name in own),
            link=INSIDE,
            kind="nvlink",
        )
        for number, own in enumerate(names)
    ]
    cluster = pk.Cluster(
        devices=tuple(pk.Device(name=name) for own in names for name in own), groups=tuple(groups)
    )
    plan = pk.plan(model(), cluster, microbatches=16, schedule="1f1b", replicas=[8])
    assert plan.summing.levels == ((0, 0, 0, 0, 1, 1, 1, 1),)
    assert plan.hosts == (0, 0, 0, 0, 1, 1, 1, 1) and plan.cards == tuple(range(8))
    between, *_ = plan.stages[0].reduce_steps
    assert between == pytest.approx(14.2e6 / RATE / 4), "a quarter through each card"


def test_tensor_groups_that_straddle_hosts_share_the_cards_on_their_way():
    topology = Topology(hosts(2, 2, 2))
    inside, left, right = links_of_groups(topology, [range(2), range(1, 3), range(3, 5)], 1e6)
    assert inside == INSIDE
    assert left.bytes_per_second == right.bytes_per_second == RATE / 2, "both pass the second card"
    (alone,) = links_of_groups(topology, [range(1, 3)], 1e6)
    assert alone.bytes_per_second == RATE


def test_a_rank_on_two_hosts_is_on_neither():
    """Pairs of six devices, of which the second pair has one on each host."""
    plan = pk.plan(
        model(output_bytes=400_000), hosts(3, 3), microbatches=6, schedule="1f1b",
        tensor_ranks=2, replicas=[3],
    )  # fmt: skip
    assert [device.name for device in plan.devices][2:4] == ["h0:2", "h1:0"]
    assert (plan.hosts, plan.cards) == ((0, 1, 2), (0, -1, 1))
    assert all(len({*numbers}) == 3 for numbers in plan.summing.levels)
    whole = pk.plan(
        model(output_bytes=400_000), hosts(4, 4), microbatches=8, schedule="1f1b",
        tensor_ranks=2, replicas=[4],
    )  # fmt: skip
    assert (whole.hosts, whole.cards) == ((0, 0, 1, 1), (0, 0, 1, 1))
    assert whole.summing.levels == ((0, 0, 1, 1),)


def test_links_inside_hosts_do_not_slow_what_goes_between_them():
    names = [[f"h{number}:{index}" for index in range(2)] for number in range(2)]
    cluster = pk.Cluster(
        devices=tuple(pk.Device(name=name) for own in names for name in own),
        groups=tuple(
            pk.Group(
                name=f"h{number}",
                members=tuple(own),
                link=pk.Link(bytes_per_second=1e8),
                card=pk.Card(bytes_per_second=1.25e10),
            )
            for number, own in enumerate(names)
        ),
    )
    tree = SumTree.of(range(4), [[0, 0, 1, 1]])
    inside, between = level_seconds(Topology(cluster), tree, {k: k for k in range(4)}, 1e8, 1)
    assert inside.seconds == pytest.approx(1.0)
    assert between.seconds == pytest.approx(1e8 / 1.25e10)
