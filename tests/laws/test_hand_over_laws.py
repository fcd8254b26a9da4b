"""Whatever the plan: an engine is given a plan that it performs as it is, or none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock.planning.handover import CAPABILITIES, from_torch_csv, nearest
from penstock.planning.handover.properties import PROPERTIES
from penstock.planning.plans import StagePlan
from tests.kit.examples import examples
from tests.kit.transformer import llama_names

FAMILIES = (
    "1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "breadth-first", "zb-v",
    "v-half", "v-min", "interleaved-zb", "hanayo", "pipedream",
)  # fmt: skip
times = st.floats(1e-3, 1.0)


@st.composite
def plans(draw):
    """Plans of a transformer, with whatever cuts, replicas and recomputation."""
    family = draw(st.sampled_from(FAMILIES))
    num_ranks, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    options = {}
    if family == "1f1b" and draw(st.booleans()):
        counts = draw(st.lists(st.integers(1, 3), min_size=num_ranks, max_size=num_ranks))
        options, num_ranks = {"replicas": counts}, sum(counts)
    microbatches = count * max(num_ranks, 2) * 2
    schedule = pk.schedules.build(
        family, num_ranks=num_ranks, num_microbatches=microbatches, **options
    )
    num_stages = schedule.num_stages
    names = llama_names(draw(st.integers(num_stages, num_stages + 6)))
    cuts = draw(
        st.lists(
            st.integers(1, len(names) - 1),
            min_size=num_stages - 1, max_size=num_stages - 1, unique=True,
        )
    )  # fmt: skip
    bounds = [0, *sorted(cuts), len(names)]
    never = family == "pipedream"
    stages = tuple(
        StagePlan(
            layers=tuple(names[bounds[index] : bounds[index + 1]]),
            rank=schedule.ranks_of(index)[0],
            forward_seconds=draw(times),
            backward_input_seconds=draw(times),
            backward_weight_seconds=draw(times),
            activation_bytes=draw(st.integers(0, 10**6)),
            recompute="none" if never else draw(st.sampled_from(["none", "layers", "stage"])),
        )
        for index in range(num_stages)
    )
    return pk.Plan(
        model="law", schedule=family, num_microbatches=microbatches, stages=stages,
        options=options, microbatch_size=draw(st.integers(0, 4)),
    )  # fmt: skip


@pytest.mark.parametrize("engine", CAPABILITIES)
@examples(20)
@given(plan=plans())
def test_an_engine_is_given_what_it_performs_or_nothing(engine, plan):
    able = CAPABILITIES[engine]
    other = nearest(plan, engine)
    try:
        handed = plan.to(engine)
    except pk.PlanError:
        assert other is None or other != plan
        if other is not None:
            assert other.layers == plan.layers
            assert other.to(engine).plan == other
        return
    assert handed.plan == other
    assert handed.plan.to(engine) == handed._replace(notes=handed.plan.to(engine).notes)
    assert not any(
        known.where(handed.plan, able) for name, known in PROPERTIES.items() if name in able.limits
    )
    assert [stage.layers for stage in other.stages] == [stage.layers for stage in plan.stages]
    assert (handed.plan == plan) == (not any(".py)" in note for note in handed.notes))


@given(plan=plans())
def test_the_csv_is_the_order_of_one_copy(plan):
    try:
        files = plan.to("torchtitan").files
    except pk.PlanError:
        return
    copies = max(plan.replicas)
    if plan.num_ranks == copies:
        assert "schedule.csv" not in files
        return
    order = from_torch_csv(files["schedule.csv"])
    assert order.num_microbatches == plan.num_microbatches // copies
    assert order.num_ranks == plan.num_ranks // copies
    sizes = json.loads(plan.to("torch").plan.to_json())["stages"]
    assert order.num_stages == len(sizes)
