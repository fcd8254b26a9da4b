"""A plan with a searched order: found under the plan's own costs and memory, carried in its file,
and run as it is carried."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import penstock as pk
from penstock.base.errors import FileError, InputError
from penstock.core.cluster import Device
from penstock.core.schedule import families
from penstock.core.schedule.lower import add_update
from penstock.core.schedule.memory import peak_activations
from penstock.engine.model.spine import spine_fingerprint, spine_of
from penstock.planning.plans import Plan, StagePlan
from penstock.planning.plans.orders import with_microbatches
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.one_device import assert_same
from tests.kit.planning import chain, devices
from tests.kit.training import adamw

COSTS = {
    "a slow first stage": ([5, 3, 3, 3], [4, 3, 3, 2], [3, 2, 3, 1], 0.2),
    "a slow third stage": ([3, 3, 5, 3], [3, 3, 4, 3], [2, 1, 4, 3], 0.0),
    "long forwards": ([4, 5, 4, 4], [2, 2, 3, 2], [1, 1, 2, 1], 0.5),
    "hardly any weight gradients": ([3, 4, 3, 4], [5, 4, 5, 4], [0.2, 0.1, 0.3, 0.1], 0.3),
}
COUNT = 8
EFFORT = 0.2
"""How long these tests search; 1 is usual."""


def stages_for(name, **more):
    forward, backward_input, backward_weight, hop = COSTS[name]
    rows = zip(forward, backward_input, backward_weight, strict=True)
    return tuple(
        StagePlan(
            layers=(f"layer{index}",),
            rank=index,
            forward_seconds=f,
            backward_input_seconds=i,
            backward_weight_seconds=w,
            hop_seconds=hop,
            activation_bytes=1000,
            weight_kept_bytes=400,
            parameter_bytes=100,
            **more,
        )
        for index, (f, i, w) in enumerate(rows)
    )


def plan_for(name, schedule="zb-auto", limit=7, count=COUNT, **more):
    searched = {"activation_limit": limit, "effort": EFFORT}
    options = searched if schedule in families.SEARCHED else {}
    return Plan(
        model="m",
        schedule=schedule,
        options=options,
        num_microbatches=count,
        stages=stages_for(name),
        **more,
    )


def for_equal_costs(limit):
    return pk.schedules.build(
        "zb-auto", num_ranks=4, num_microbatches=COUNT, activation_limit=limit, effort=EFFORT
    )


def makespan(order, costs):
    return pk.simulate(add_update(order), costs).makespan


@pytest.mark.parametrize("name", COSTS)
def test_an_order_is_found_for_the_costs_of_the_stages(name):
    found = plan_for(name)
    blind = for_equal_costs(limit=7)
    assert found.step_seconds == makespan(found.build_schedule(), found.costs)
    assert found.step_seconds <= makespan(blind, found.costs) * (1 + 1e-12)
    # With nearly twice as much in flight as the fixed order keeps, a few percent are to be had,
    # unless the slowest stage is busy almost all the time.
    margin = 1.0 if name == "a slow third stage" else 0.98
    assert found.step_seconds < margin * plan_for(name, "zb-h1").step_seconds


def test_true_costs_give_another_order_than_equal_ones():
    gains = []
    for name in COSTS:
        found = plan_for(name, limit=4)
        blind = for_equal_costs(limit=4)
        gains.append(1 - found.step_seconds / makespan(blind, found.costs))
    assert min(gains) >= -1e-12
    assert max(gains) > 0.01


@pytest.mark.parametrize("schedule", ["zb-auto", "optimal"])
def test_the_planner_searches_for_the_cuts_that_it_chose(schedule):
    """What was wrong once: the order in a plan was that of F = I = W, and as fast as zb-h1."""
    layers = tuple(
        pk.Layer(
            name=f"layer{index}",
            forward_seconds=f / 1000,
            backward_input_seconds=i / 1000,
            backward_weight_seconds=w / 1000,
            activation_bytes=1000,
            output_bytes=10,
        )
        for index, (f, i, w) in enumerate(zip(*COSTS["long forwards"][:3], strict=True))
    )
    graph = pk.LayerGraph(layers=layers, hop_seconds=0.0005)
    request = {"microbatches": 4 if schedule == "optimal" else COUNT, "cuts": [1, 2, 3]}
    found = pk.plan(graph, devices(4), schedule=schedule, **request)
    fixed = pk.plan(graph, devices(4), schedule="zb-h1", **request)
    if schedule == "zb-auto":
        blind = for_equal_costs(found.options["activation_limit"])
        assert found.step_seconds < 0.999 * makespan(blind, found.costs)
    assert found.step_seconds < 0.98 * fixed.step_seconds
    assert Plan.from_json(found.to_json()) == found


def test_two_stages_per_rank_are_searched_on_a_v():
    found = pk.plan(chain(4), devices(2), schedule="zb-auto", stages=4, microbatches=3)
    assert [stage.rank for stage in found.stages] == [0, 1, 1, 0]
    assert found.options["placement"] == "v"
    assert found.edited(order=()).num_ranks == 2
    assert Plan.from_json(found.to_json()) == found


def test_the_order_keeps_to_the_memory_that_weights_leave():
    state, seconds, held = 2 * 100, [], []
    for room in (1000, 3500, 10**6):
        own = tuple(Device(name=f"d{rank}", memory_bytes=state + room) for rank in range(4))
        found = plan_for("long forwards", devices=own)
        held.append(max(found.rank_bytes) - state)
        assert held[-1] <= min(room, 7 * 1000)  # the devices' limit, and the plan's own
        seconds.append(found.step_seconds)
    assert held == sorted(held)
    assert held[0] == 1000 < held[1]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("again", ["stage", "layers"])
def test_what_runs_again_counts(again):
    stages = tuple(
        replace(stage, recompute=again, input_bytes=50, layer_input_bytes=50, weight_kept_bytes=40)
        for stage in stages_for("a slow first stage")
    )
    own = tuple(Device(name=f"d{rank}", memory_bytes=200 + 1000 + 4 * 50) for rank in range(4))
    found = plan_for("a slow first stage", devices=own).edited(stages=stages, order=())
    assert max(found.rank_bytes) <= 1400
    assert makespan(found.build_schedule(), found.costs) == found.step_seconds
    fixed = replace(found, schedule="zb-h1", options={}, order=(), devices=())
    assert found.step_seconds <= fixed.step_seconds * (1 + 1e-12)


def test_the_order_is_in_the_file_and_loading_does_not_search(tmp_path, monkeypatch):
    found = plan_for("a slow third stage")
    found.save(tmp_path / "plan.json")
    monkeypatch.setattr(families, "build", None)
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == found
    assert "".join(f"{line}\n" for line in loaded.order) == str(loaded.build_schedule())
    content = json.loads((tmp_path / "plan.json").read_text())
    assert len(content["order"]) == 4
    assert content["order"][0].startswith("0F0,")


def test_other_plans_carry_no_order():
    assert plan_for("long forwards", "zb-h1").order == ()
    with pytest.raises(InputError, match="order: zb-h1 makes its own; leave order out, or take"):
        replace(plan_for("long forwards", "zb-h1"), order=("0F0,0B0",))


def edit(lines, rank, old, new):
    lines[rank] = lines[rank].replace(old, new, 1)


EDITS = {
    "an op that is missing": (lambda o: edit(o, 0, "0F0,", ""), "order: 0F0 missing: every stage"),
    "an op twice": (lambda o: edit(o, 1, "1F0,", "1F0,1F0,"), r"1F0 stand\(s\) more than once"),
    "no op": (lambda o: edit(o, 1, "1F0", "1G0"), "order: line 2, cell 1: '1G0' is not an op"),
    "another stage": (lambda o: edit(o, 0, "0F0,", "7F0,"), "order: .* missing"),
    "a pass": (lambda o: edit(o, 0, "0F0,", "0F0,0R0,"), "0R0 is no op of whole microbatches"),
    "a slice": (lambda o: edit(o, 0, "0F0,", "0F0,0F0.1,"), "0F0.1 is no op of whole"),
    "a deadlock": (lambda o: o.__setitem__(3, ",".join(reversed(o[3].split(",")))), "deadlocks"),
    "a rank too few": (lambda o: o.pop(), "order: there are 3 lines for 4 ranks"),
    "an empty line": (lambda o: o.__setitem__(2, ""), "order: rank 2 has no ops"),
    "ranks exchanged": (lambda o: o.reverse(), "stage 0 is on rank 0, but zb-auto runs it on"),
    "two lines in one": (lambda o: o.__setitem__(0, o[0] + "\n" + o[1]), "5 lines for 4 ranks"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_order_that_was_edited_wrongly_is_refused_in_one_sentence(name):
    content = json.loads(plan_for("long forwards", count=4).to_json())
    change, message = EDITS[name]
    change(content["order"])
    with pytest.raises(FileError, match=message):
        Plan.from_json(json.dumps(content))


def test_an_order_for_another_number_of_microbatches_is_refused():
    found = plan_for("long forwards", count=4)
    with pytest.raises(InputError, match="order is for 4 microbatches, but num_microbatches is 5"):
        replace(found, num_microbatches=5)
    longer = found.edited(num_microbatches=5, order=())
    assert longer.build_schedule().num_microbatches == 5


def test_a_stage_on_two_ranks_is_refused():
    found = plan_for("long forwards", count=2)
    lines = [line.split(",") for line in found.order]
    moved = [op for op in lines[0] if op.endswith("1")]
    lines[0] = [op for op in lines[0] if not op.endswith("1")]
    lines[1] = moved[:1] + lines[1] + moved[1:]
    with pytest.raises(InputError, match="order: stage 0 stands on ranks 0, 1; give it 1 rank"):
        replace(found, order=tuple(map(",".join, lines)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 1}, "zb-auto has no option speed"),
        ({"costs": 1}, "options: costs of a plan are those of its stages; leave costs out"),
        ({"placement": "v"}, "zb-auto: .*rank|placement puts stages on ranks"),
        ({"activation_limit": [1]}, "1 numbers for 4 ranks"),
    ],
)
def test_options_that_a_searched_plan_cannot_have(options, message):
    with pytest.raises(InputError, match=message):
        plan_for("long forwards", count=2).edited(options=options, order=())


@settings(max_examples=40)
@given(st.data(), st.integers(1, 4), st.integers(1, 7), st.sampled_from(["straight", "v"]))
def test_an_order_for_fewer_or_more_microbatches_is_an_order(data, num_ranks, own, placement):
    limit = data.draw(st.integers(1, 6))
    order = pk.schedules.build(
        "zb-auto",
        num_ranks=num_ranks,
        num_microbatches=own,
        placement=placement,
        activation_limit=limit,
        effort=data.draw(st.sampled_from([0, 0.05])),
    )
    count = data.draw(st.integers(1, 2 * own + 1))
    other = with_microbatches(order, count)
    pk.check(other)
    assert other.num_microbatches == count
    assert all(a <= b for a, b in zip(peaks(other), peaks(order), strict=True))
    if count <= own:
        kept = [[op for op in ops if op.microbatch < count] for ops in order.ranks]
        assert [list(ops) for ops in other.ranks] == kept


def peaks(schedule):
    return peak_activations(schedule.ranks)


def test_training_performs_the_carried_order_with_the_results_of_one_device():
    model, reference = make_mlp(dropout=0.0), make_mlp(dropout=0.0)
    layers = spine_of(model)
    borders = list(accumulate((2, 1, 3), initial=0))
    stages = tuple(
        replace(stage, layers=tuple(layer.name for layer in layers[start:stop]))
        for stage, start, stop in zip(
            stages_for("a slow third stage"), borders, borders[1:], strict=False
        )
    )
    plan = Plan(
        model=spine_fingerprint(layers),
        schedule="zb-auto",
        options={"activation_limit": 5, "effort": EFFORT},
        num_microbatches=4,
        stages=stages,
    )
    assert Plan.from_json(plan.to_json()) == plan
    alone = SingleDevice(reference, 4, F.cross_entropy, adamw)
    rows = [8, 3, 8, 1]  # two of the minibatches have fewer microbatches than the plan
    batches = [make_batch(count, seed=seed) for seed, count in enumerate(rows)]
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=adamw, deadline_seconds=300
    ) as pipeline:
        losses = [pipeline.step(*batches[0])]
        performed = [
            tuple(span.op for span in sorted(own, key=lambda span: span.start))
            for own in (
                [span for span in pipeline.timeline.spans if span.rank == rank] for rank in range(3)
            )
        ]
        losses += pipeline.steps(batches[1:])
    planned = plan.build_schedule().ranks
    kinds = {op.kind for ops in planned for op in ops}
    assert [tuple(op for op in ops if op.kind in kinds) for ops in performed] == list(planned)
    assert torch.equal(torch.stack(losses), torch.stack([alone.step(*one) for one in batches]))
    assert_same(model, reference)
