"""A value or a file of the wrong kind: the error says what it is, what is wanted, and what was
probably meant."""

from __future__ import annotations

import json
import re

import pytest
from torch.nn import functional as F

import penstock as pk
from penstock.base.errors import FileError, InputError
from penstock.base.mistaken import VALUE_KINDS, kind_in
from tests.kit.helpers import make_mlp, make_plan

LAYER = {"forward_seconds": 1.0, "backward_input_seconds": 1.0, "backward_weight_seconds": 1.0}
GRAPH = pk.LayerGraph.from_json(
    json.dumps({"layers": [{"name": name, **LAYER, "output_bytes": 8} for name in "ab"]})
)
CLUSTER = pk.Cluster(devices=(pk.Device(name="x"), pk.Device(name="y")))
PLAN = pk.plan(GRAPH, CLUSTER, microbatches=4, schedule="1f1b", stages=2)
SCHEDULE = pk.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
VALUES = (PLAN, GRAPH, CLUSTER, SCHEDULE, pk.simulate(SCHEDULE))


@pytest.mark.parametrize("reader", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("given", VALUES, ids=lambda value: type(value).__name__)
def test_a_file_of_another_kind_says_of_which_and_what_reads_it(tmp_path, given, reader):
    path, wanted = tmp_path / "a file.json", type(reader)
    given.save(path)
    if type(given) is wanted:
        assert wanted.load(path).to_json() == given.to_json()
        return
    words = [VALUE_KINDS[kind.__name__].words for kind in (type(given), wanted)]
    with pytest.raises(FileError) as caught:
        wanted.load(path)
    assert f"{path} holds {words[0]}, where {words[1]} is wanted; `penstock" in str(caught.value)
    assert f"'{path}'" in str(caught.value)  # as a shell takes it
    assert f"penstock.{type(given).__name__}.load reads it" in str(caught.value)


def test_a_table_of_ops_is_a_schedule(tmp_path):
    path = tmp_path / "ops.csv"
    SCHEDULE.save(path)
    with pytest.raises(FileError, match=r"ops.csv holds a schedule, where a plan is wanted"):
        pk.Plan.load(path)


def test_what_makes_the_wanted_of_the_given_is_enough():
    with pytest.raises(FileError) as caught:
        pk.Plan.from_json(GRAPH.to_json())
    assert str(caught.value) == (
        "text holds a model's profile, where a plan is wanted; `penstock plan FILE` makes a plan "
        "of it, penstock.LayerGraph.load reads it"
    )


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_is_wrong_inside_a_file_of_the_right_kind_is_still_said(value):
    wrong = {**json.loads(value.to_json()), "extra": 1}
    with pytest.raises(FileError, match="unknown field `extra`"):
        type(value).from_json(json.dumps(wrong))


def test_keys_of_two_kinds_are_those_of_the_closer_one():
    assert kind_in('{"devices": [], "stages": [], "schedule": ""}') == "Plan"
    assert kind_in('{"devices": [], "layers": []}') == "LayerGraph"
    assert kind_in('{"devices": [], "layers": []}', "Cluster") == "Cluster"
    assert kind_in("[" * 100_000) is kind_in("0F0 is an op") is kind_in("") is None


class NoPlan:
    """Has the name of a kind, and nothing else of it."""


NoPlan.__name__ = "Plan"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pk.draw("1f1b"),
            "the timeline is '1f1b', the name of a schedule; penstock.simulate("
            "penstock.schedules.build('1f1b', num_ranks=4, num_microbatches=8)) makes a timeline",
        ),
        (
            lambda: pk.draw("interleaved-1f1b:stages_per_rank=3"),
            "build('interleaved-1f1b', num_ranks=4, num_microbatches=8, stages_per_rank=3)",
        ),
        (lambda: pk.draw("plan.json"), "a file; penstock.Timeline.load('plan.json') reads it"),
        (lambda: pk.draw(SCHEDULE), "the timeline is a schedule; penstock.simulate makes"),
        (
            lambda: pk.draw(GRAPH),
            "the timeline is a model's profile; penstock.plan makes a plan of",
        ),
        (lambda: pk.draw(NoPlan()), "the timeline is of type Plan"),
        (lambda: pk.draw(pk.Plan), "the timeline is the class Plan"),
        (lambda: pk.plan(PLAN), "the graph is a plan; penstock.draw shows it, penstock.replan"),
        (lambda: pk.plan(GRAPH, "c.toml"), "a file; penstock.Cluster.load('c.toml') reads it"),
        (lambda: pk.Pipeline(make_mlp(), GRAPH), "the plan is a model's profile; penstock.plan"),
        (
            lambda: pk.Pipeline(make_mlp(), "zb-h1"),
            "the plan is 'zb-h1', the name of a schedule; penstock.plan(…, schedule='zb-h1')",
        ),
    ],
)
def test_a_value_of_another_kind_says_of_which_and_what_takes_it(call, message):
    with pytest.raises(InputError, match=re.escape(message)):
        call()


def test_a_pipeline_says_what_of_it_can_be_drawn():
    model = make_mlp()
    with (
        pk.Pipeline(model, make_plan(model, 2, 4), loss=F.cross_entropy) as pipeline,
        pytest.raises(InputError, match=r"is a pipeline; give its pipeline.timeline, of the last"),
    ):
        pk.draw(pipeline)
