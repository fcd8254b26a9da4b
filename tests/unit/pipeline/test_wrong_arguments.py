"""Whatever is given to the planning half of the library: it works, or one sentence says what is
wrong. Nothing else is raised, nothing is ``nan``, nothing takes long."""

from __future__ import annotations

import dataclasses
import inspect
import math
from itertools import product

import pytest

import penstock as pk
from penstock.base.errors import InputError, PenstockError
from penstock.base.values import shown
from penstock.planning.planner import what_if
from penstock.planning.plans.stage_plan import StagePlan

ODD = (
    None, "1", b"x", [], {}, (1, 2), object(), True, 1.5,
    math.nan, math.inf, -1, 10**12, 10**5000, 1e308, 1e-320,
)  # fmt: skip


def layer(**fields):
    usual = {"forward_seconds": 1.0, "backward_input_seconds": 1.0, "backward_weight_seconds": 1.0}
    return pk.Layer(**{"name": "a", **usual, "output_bytes": 8, "activation_bytes": 8, **fields})


def graph(**fields):
    return pk.LayerGraph(**{"layers": (layer(), layer(name="b"), layer(name="c")), **fields})


def cluster(**fields):
    return pk.Cluster(**{"devices": (pk.Device(name="x"), pk.Device(name="y")), **fields})


PLAN = pk.plan(graph(), cluster(), microbatches=4, schedule="1f1b", stages=2)
SCHEDULE = PLAN.build_schedule()
TIMELINE = PLAN.simulate()


def planned(of=None, on=None, **request):
    wanted = {"microbatches": 4, "schedule": "1f1b", "stages": 2, **request}
    return pk.plan(of or graph(), on or cluster(), **wanted)


def of_stage(**fields):
    first, second = PLAN.stages
    own = {name: getattr(first, name) for name in first.__struct_fields__}
    return pk.Plan(
        model=PLAN.model,
        schedule="1f1b",
        num_microbatches=4,
        stages=(StagePlan(**{**own, **fields}), second),
    )


def with_costs(**costs):
    return pk.simulate(SCHEDULE, pk.Costs(**costs))


def fields_of(kind):
    return kind.__struct_fields__


FIELDS = {
    "layer": (
        fields_of(pk.Layer),
        lambda **one: planned(graph(layers=(layer(name="z"), layer(**one)))),
    ),
    "graph": (fields_of(pk.LayerGraph), lambda **one: planned(graph(**one))),
    "device": (
        fields_of(pk.Device),
        lambda **one: planned(
            on=cluster(devices=(pk.Device(**{"name": "x", **one}), pk.Device(name="y")))
        ),
    ),
    "link": (fields_of(pk.Link), lambda **one: planned(on=cluster(link=pk.Link(**one)))),
    "cluster": (fields_of(pk.Cluster), lambda **one: planned(on=cluster(**one))),
    "stage": (fields_of(StagePlan), of_stage),
    "plan": (tuple(inspect.signature(pk.plan).parameters)[2:], planned),
    "costs": ([field.name for field in dataclasses.fields(pk.Costs)], with_costs),
}  # fmt: skip


def outcome(call, *args, **kwargs):
    """What a call gives, or the sentence with which it refuses."""
    try:
        return call(*args, **kwargs)
    except PenstockError as error:
        assert len(str(error)) < 600
        assert error.__traceback__ is not None
        return error


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, (fields, _) in FIELDS.items() for field in fields]
)
def test_a_field_of_any_kind_is_taken_or_refused(kind, field):
    make = FIELDS[kind][1]
    for value in ODD:
        made = outcome(make, **{field: value})
        if isinstance(made, pk.Plan):
            made = made.simulate()
        if isinstance(made, pk.Timeline):
            assert math.isfinite(made.makespan)
            assert 0 <= made.bubble < 1
            pk.draw(made)


CALLS = {
    "plan of": lambda odd: pk.plan(odd, cluster(), microbatches=2),
    "plan on": lambda odd: pk.plan(graph(), odd, microbatches=2) and odd is None,
    "simulate": pk.simulate,
    "simulate with": lambda odd: pk.simulate(SCHEDULE, odd),
    "check": pk.check,
    "check capacity": lambda odd: pk.check(SCHEDULE, odd),
    "draw": pk.draw,
    "draw to": lambda odd: pk.draw(TIMELINE, odd),
    "parse a schedule": pk.Schedule.parse,
    "parse an op": pk.Op.parse,
    "schedule of": lambda odd: pk.check(pk.Schedule.of(odd)),
    "schedule of ranks": lambda odd: pk.check(pk.Schedule.of([odd])),
    "schedule of ops": lambda odd: pk.check(pk.Schedule.of([[odd]])),
    "schedule": lambda odd: pk.check(pk.Schedule(odd)),
    "schedule's name": lambda odd: pk.schedules.build(odd, num_ranks=2, num_microbatches=2),
    "family": pk.schedules.family,
    "sizes": lambda odd: TIMELINE.peak_bytes(pk.Sizes(odd)),
    "each size": lambda odd: TIMELINE.peak_bytes(pk.Sizes([odd, odd])),
    "peak of": TIMELINE.peak_bytes,
    "timeline from": pk.Timeline.from_json,
    "plan from": pk.Plan.from_json,
    "plan in": pk.Plan.load,
    "cluster in": pk.Cluster.load,
    "cluster from TOML": pk.Cluster.from_toml,
    "save to": lambda odd: graph().save(odd) if not isinstance(odd, str) else None,
    "devices": lambda odd: pk.Cluster.local(odd, "cpu"),
    "kind of device": lambda odd: pk.Cluster.local(2, odd),
    "tree": lambda odd: pk.Cluster.tree(odd, [pk.Link()]),
    "tree's count": lambda odd: pk.Cluster.tree([odd], [pk.Link()]),
    "tree's links": lambda odd: pk.Cluster.tree([2], odd),
    "tree's device": lambda odd: pk.Cluster.tree([2], [pk.Link()], device=odd),
    "microbatch size": lambda odd: graph().at(odd),
    "order": lambda odd: graph().reordered(odd),
    "recompute": PLAN.recomputing,
    "versions": PLAN.with_versions,
    "minibatches": PLAN.simulate,
    "what if": lambda odd: what_if(odd, graph(), cluster(), microbatches=4),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_any_kind_is_taken_or_refused(name):
    refused = [value for value in ODD if isinstance(outcome(CALLS[name], value), PenstockError)]
    assert len(refused) > len(ODD) // 3


@pytest.mark.parametrize("name", pk.schedules.names())
def test_an_option_of_any_kind_is_taken_or_refused(name):
    options = tuple(inspect.signature(pk.schedules.family(name)).parameters)
    for option, value in product(options, ODD):
        counts = {"num_ranks": 2, "num_microbatches": 2}
        outcome(pk.schedules.build, name, **{**counts, option: value})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer(forward_seconds="fast"), "layer 'a': forward_seconds is 'fast'.*`float`"),
        (lambda: layer(output_bytes=10**29), "output_bytes is 1000.* at most"),
        (lambda: graph(layers=(layer(output_bytes=2**60),)), "layers' output_bytes in all is"),
        (lambda: pk.Device(name="x", speed=1e-320), "device 'x': speed is 1e-320, .* 1e-06 to"),
        (lambda: pk.Cluster.local(10**12), "num_devices is 1000000000000, but may be 100,000"),
        (lambda: pk.Cluster.tree([10**6, 10**6], [pk.Link()] * 2), "count of a tree is 1000000,"),
        (lambda: pk.Costs(forward=1e308), "forward is 1e[+]308, but may be 1e[+]30 at most"),
        (lambda: pk.Costs(hop=1e-320), "hop is 1e-320, but must be 0 or ≥ 1e-30"),
        (lambda: pk.simulate(pk.Schedule.of([["0F0"]])), "rank 0 has '0F0' where an op belongs"),
        (
            lambda: pk.schedules.build(
                "hanayo", num_ranks=1000, num_microbatches=1000, num_waves=1000
            ),
            "1000 ranks × 1000 microbatches × 1000 parts are more",
        ),
    ],
)  # fmt: skip
def test_what_is_out_of_all_reason_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_what_an_error_shows_is_short_and_one_line():
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown("x" * 10_000)) == 80
    assert shown(10**5000) == "a value of type int that cannot be printed"


def test_numpys_numbers_and_lists_become_plain_ones():
    numpy = pytest.importorskip("numpy")
    made = pk.Cluster(
        devices=[pk.Device(name="x", speed=numpy.float32(2), memory_bytes=numpy.int64(8))]
    )
    assert made == pk.Cluster.from_json(made.to_json())
    assert isinstance(made.devices, tuple)
