"""What a rank knows before it runs: edges, waits, what forwards keep, where skips go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.schedule import Kind, Op, families
from penstock.core.schedule.lower import add_communication, add_recompute, split_backward
from penstock.core.schedule.rounds import Segment
from penstock.engine.run.rank.program import RankProgram, SkipRoute
from penstock.engine.stage.stage import Keep
from tests.kit.helpers import runnable_families


def lowered(name, num_ranks=2, num_microbatches=8):
    return add_communication(
        families.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    )


@given(name=st.sampled_from(runnable_families()), num_ranks=st.sampled_from([2, 4]))
def test_every_send_has_one_receive_on_the_same_edge(name, num_ranks):
    schedule = lowered(name, num_ranks)
    sends, receives = {}, {}
    for rank in range(num_ranks):
        program = RankProgram(Segment.whole(schedule), rank)
        for op, edge in program.edges.items():
            sending = op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
            (sends if sending else receives).setdefault((edge, op.microbatch), []).append(op)
            assert (edge.source if sending else edge.target) == rank
            assert sending or f"rank {edge.source}" in program.waiting[op]
        assert {edge for edge in program.edges.values() if edge.source == rank} == (
            program.outgoing()
        )
    assert sends.keys() == receives.keys()
    assert all(len(ops) == 1 for ops in [*sends.values(), *receives.values()])


@pytest.mark.parametrize(
    ("change", "first", "again"),
    [
        (lambda one: one, Keep.EVERYTHING, Keep.EVERYTHING),
        (split_backward, Keep.SPLIT, Keep.SPLIT),
        (add_recompute, Keep.INPUT, Keep.EVERYTHING),
        (lambda one: add_recompute(split_backward(one)), Keep.INPUT, Keep.SPLIT),
    ],
)
def test_a_forward_keeps_what_its_backward_needs(change, first, again):
    schedule = change(families.build("1f1b", num_ranks=2, num_microbatches=3))
    program = RankProgram(Segment.whole(schedule), 1)
    assert program.keeps == {(1, k): first for k in range(3)}
    assert program.keeps_again == {(1, k): again for k in range(3)}


def test_skips_go_straight_to_their_stage_and_within_a_rank_nowhere():
    # zb-v with two ranks: stages 0 and 3 on rank 0, stages 1 and 2 on rank 1.
    routes = [SkipRoute("a", 0, 3, 0), SkipRoute("b", 0, 2, 1), SkipRoute("c", 1, 2, 2)]
    program = RankProgram(Segment.whole(lowered("zb-v")), 0, routes)
    across = [program.skip_edge(route, 0, backward=False) for route in routes]
    assert across[0] is None
    assert across[2] is None
    assert (across[1].source, across[1].target) == (0, 1)
    back = program.skip_edge(routes[1], 0, backward=True)
    assert (back.source, back.target) == (1, 0)
    assert back.tag != across[1].tag
    assert across[1] in program.outgoing()
    assert [route.key for route in program.stashes[0]] == ["a", "b"]
    assert [route.key for route in program.recalls[3]] == ["a"]


def test_the_tags_of_skips_and_of_the_chain_differ():
    routes = [SkipRoute(str(index), 0, 3, index) for index in range(3)]
    program = RankProgram(Segment.whole(lowered("1f1b", 4)), 0, routes)
    skips = {program.skip_edge(r, 0, backward=b).tag for r in routes for b in (False, True)}
    assert len(skips) == 6
    assert not skips & {edge.tag for edge in program.edges.values()}
    assert Op(0, Kind.FORWARD, 0) in program.schedule.where
