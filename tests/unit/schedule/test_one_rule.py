"""There is one rule of what an op needs, and everyone asks it: the law's proof, table by table."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Costs, Kind, Op, schedules
from penstock.core.schedule.lower import lower, split_backward
from penstock.core.schedule.op import (
    COMPUTE,
    RECEIVED_BY,
    RECEIVES,
    SENDS,
    SENT_BY,
    dependencies,
    other_end,
)
from penstock.core.schedule.search import problem as tables
from penstock.core.schedule.search import whole_ranks
from tests.kit.paths import ROOT

SOURCE = ROOT / "src" / "penstock"
KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD)


@st.composite
def problems(draw):
    """Pipelines of which any rank may have any stages, with costs that tell all edges apart."""
    num_ranks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
    placement = tuple(draw(st.permutations([*range(num_ranks), *extra])))
    hops = [float(2**edge) for edge in range(len(placement))]
    return tables.OrderingProblem(
        placement, 3, Costs(hop=hops), whole_ranks(placement), (float(len(placement)),) * num_ranks
    )


def needs_elsewhere(problem, op, present):
    needed = dependencies(op, problem.num_stages - 1, present)
    return [other for other in needed if other.stage != op.stage]


def decoded(problem, number):
    rest, kind = divmod(number, tables.NUM_KINDS)
    microbatch, stage = divmod(rest, problem.num_stages)
    return Op(stage, KINDS[kind], microbatch)


@given(problem=problems())
def test_what_a_search_evaluates_orders_with_is_the_rule(problem):
    stages = range(problem.num_stages)
    present = {Op(stage, kind, 1) for stage in stages for kind in KINDS[:3]}
    for at, (_, offset, delay, _) in enumerate(problem.arcs):
        stage, kind = divmod(at, tables.NUM_KINDS)
        op = Op(stage, KINDS[kind], 1)
        expected = needs_elsewhere(problem, op, present)
        number = problem.number(kind, stage, 1)
        assert [decoded(problem, number + offset)] * bool(offset) == expected
        crosses = [n for n in expected if problem.placement[n.stage] != problem.placement[stage]]
        assert delay == sum(problem.durations.delay(needed, op) for needed in crosses)


@given(problem=problems())
def test_what_a_list_scheduler_wakes_is_the_rule_from_its_other_side(problem):
    stages = range(problem.num_stages)
    present = {Op(stage, kind, 0) for stage in stages for kind in KINDS[:3]}
    woken = {
        (Op(stage, KINDS[kind], 0), Op(target, KINDS[later], 0))
        for kind, row in enumerate(problem.followers)
        for stage, followers in enumerate(row)
        for later, target, _ in followers
    }
    for op in present:
        needed = set(dependencies(op, problem.num_stages - 1, present))
        wakers = {waker for waker, later in woken if later == op}
        # Of several needs the last one wakes: what another stage gives, if that is among them.
        assert wakers <= needed
        assert len(wakers) == bool(needed)
        assert wakers == set(needs_elsewhere(problem, op, present)) or not needs_elsewhere(
            problem, op, present
        )


@settings(max_examples=25)
@given(name=st.sampled_from(["1f1b", "zb-h1", "zb-v", "chimera", "seq1f1b"]), split=st.booleans())
def test_messages_are_what_the_rule_says_crosses_ranks(name, split):
    schedule = schedules.build(name, num_ranks=4, num_microbatches=8)
    schedule = split_backward(schedule) if split else schedule
    lowered = lower(schedule)
    crossing = {
        (needed, op)
        for op, rank in schedule.where.items()
        for needed in schedule.dependencies(op)
        if schedule.where[needed] != rank
    }
    sends = {needed._replace(kind=SENT_BY[needed.kind]) for needed, _ in crossing}
    receives = {op._replace(kind=RECEIVED_BY[op.kind]) for _, op in crossing}
    assert sends == {op for op in lowered.where if op.kind in SENDS}
    assert (
        receives
        == {op for op in lowered.where if op.kind in RECEIVES}
        == set(map(other_end, sends))
    )


@pytest.mark.parametrize("kind", sorted(SENDS | RECEIVES))
def test_the_two_ends_of_a_message_name_each_other(kind):
    op = Op(3, kind, 1)
    assert other_end(other_end(op)) == op
    receive, send = (op, other_end(op)) if kind in RECEIVES else (other_end(op), op)
    assert dependencies(receive, 5, ()) == (send,)


def spells_a_neighbour(node: ast.AST) -> bool:
    """Whether a piece of code makes an op of the stage before or behind another op's."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    stages = [keyword.value for keyword in node.keywords if keyword.arg == "stage"]
    stages += node.args[:1] if name == "Op" else []
    return name in ("Op", "_replace") and any(
        isinstance(stage, ast.BinOp)
        and any(
            isinstance(part, ast.Attribute) and part.attr == "stage" for part in ast.walk(stage)
        )
        for stage in stages
    )


def test_no_other_file_spells_the_rule():
    spelling, reading = set(), set()
    for path in SOURCE.rglob("*.py"):
        name, text = str(path.relative_to(SOURCE)), path.read_text()
        mentions = "Op" in text or "NEEDS" in text
        for node in ast.walk(ast.parse(text)) if mentions else ():
            if spells_a_neighbour(node):
                spelling.add(name)
            if isinstance(node, ast.Name) and node.id in ("NEEDS", "BEFORE"):
                reading.add(name)
    # ``needs`` reads the tables for whole columns.
    assert spelling == {"core/schedule/op.py"}
    readers = ("op.py", "needs.py")
    assert reading == {f"core/schedule/{name}" for name in readers}
    assert set(SENT_BY) == set(RECEIVED_BY) == COMPUTE - {Kind.BACKWARD_WEIGHT}
