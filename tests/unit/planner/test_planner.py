import json

import pytest
from msgspec.structs import replace

from benchmarks.planning.calls import counting
from penstock import Cluster, Device, LayerGraph, Link, plan
from penstock.base.errors import FileError, InputError, ModelError, PlanError
from penstock.core.cluster import Group
from penstock.planning.planner.offers import guided, offers
from penstock.planning.planner.race import Race
from penstock.planning.planner.request import Constraints
from penstock.planning.planner.search import plan as search
from penstock.planning.planner.task import Task
from penstock.planning.plans import Plan, StagePlan
from tests.kit.planning import KIB, chain, devices


def layers_of(found):
    return [len(stage.layers) for stage in found.stages]


def test_two_devices_halve_the_chain():
    found = plan(chain(), devices(2), microbatches=8, schedule="1f1b")
    assert (found.schedule, layers_of(found)) == ("1f1b", [2, 2])
    assert found.model == chain().fingerprint
    assert found.simulate().makespan == pytest.approx(9 * 0.06)
    assert found.reason == (
        "2 stages with 1f1b: 540 ms a step, 1.78× one device; data parallelism on 2 devices would "
        "take 480 ms, but is not what was asked for"
    )


def test_free_links_make_data_parallelism_the_best():
    found = plan(chain(), devices(2), microbatches=8)
    assert (found.replicas, found.step_seconds) == ((2,), pytest.approx(0.48))
    assert found.reason == (
        "data parallelism on 2 devices: 480 ms a step, 2.00× one device; 2 stages with 1f1b would "
        "take 540 ms, with its devices idle 11% of the time"
    )


def test_a_schedule_and_a_number_of_stages_can_be_asked_for():
    found = plan(chain(), devices(4), microbatches=4, schedule="gpipe", stages=3)
    assert (found.schedule, layers_of(found)) == ("gpipe", [2, 1, 1])
    assert "data parallelism on 4 devices would take 120 ms" in found.reason


def test_slow_links_make_one_device_the_best():
    cluster = replace(devices(4), link=Link(latency_seconds=1))
    found = plan(chain(), cluster, microbatches=4)
    assert (found.num_ranks, found.stages[0].hop_seconds) == (1, 0)
    assert found.reason == (
        "1 stage with 1f1b: 480 ms a step, 1.00× one device; data parallelism on 2 devices would "
        "take 2.24 s, 2 s of it to exchange gradients"
    )


def test_a_layer_that_dwarfs_all_others_leaves_devices_free():
    layers = list(chain(4, seconds=0).layers)
    layers[0] = replace(layers[0], forward_seconds=1)
    found = plan(LayerGraph(layers=tuple(layers)), devices(4), microbatches=4, replicas="1")
    assert found.num_ranks == 1
    pipelines = Constraints(any_replicas=False)
    race = Race()
    race.run([Task(LayerGraph(layers=tuple(layers)), devices(4), 4)], pipelines)
    assert race.winner.setting.num_ranks == 1


def test_what_a_stage_is_made_of():
    graph = replace(
        chain(4, update_seconds=0.002, optimizer_bytes=3 * KIB), hop_seconds=0.001, num_threads=3
    )
    cluster = replace(devices(2, speed=2.0), link=Link(bytes_per_second=2000 * KIB))
    found = plan(graph, cluster, microbatches=4, stages=2, schedule="1f1b")
    assert found.num_threads == 3
    first, last = found.stages
    assert first.forward_seconds == pytest.approx(0.01)
    assert (first.update_seconds, first.hop_seconds) == (0.002, pytest.approx(0.002))
    assert (last.rank, last.hop_seconds) == (1, 0)
    assert (first.parameter_bytes, first.optimizer_bytes) == (2 * KIB, 6 * KIB)
    # The layers' own, and what was received.
    assert (first.activation_bytes, last.activation_bytes) == (18 * KIB, 18 * KIB)
    assert (first.weight_kept_bytes, last.weight_kept_bytes) == (10 * KIB, 10 * KIB)
    assert (first.input_bytes, last.input_bytes) == (0, 2 * KIB)
    assert (first.layer_input_bytes, last.layer_input_bytes) == (2 * KIB, 4 * KIB)
    assert (first.peak_activations, last.peak_activations) == (2, 1)
    assert first.memory_bytes == (2 * 2 + 6 + 2 * 18) * KIB


def test_a_link_with_latency_was_measured_as_a_whole():
    graph = replace(chain(2), hop_seconds=0.001)
    cluster = replace(devices(2), link=Link(latency_seconds=0.002))
    found = plan(graph, cluster, microbatches=4, stages=2)
    assert found.stages[0].hop_seconds == 0.002


def test_a_large_output_is_not_cut_where_its_hop_costs_more_than_evenness():
    layers = list(chain().layers)
    layers[1] = replace(layers[1], output_bytes=2000 * KIB)
    cluster = replace(devices(2), link=Link(bytes_per_second=2000 * KIB))
    found = plan(LayerGraph(layers=tuple(layers)), cluster, microbatches=4, stages=2)
    assert layers_of(found) in ([1, 3], [3, 1])


def test_the_faster_device_gets_more_layers():
    cluster = Cluster(devices=(Device(name="slow"), Device(name="fast", speed=3.0)))
    assert layers_of(plan(chain(), cluster, microbatches=8, stages=2)) == [1, 3]


def test_a_small_device_gets_fewer_layers():
    cluster = Cluster(devices=(Device(name="small", memory_bytes=24 * KIB), Device(name="large")))
    found = plan(chain(), cluster, microbatches=8, schedule="gpipe", recompute="never")
    assert [device.name for device in found.devices] == ["large"]
    small_first = Cluster(devices=(cluster.devices[0], Device(name="full", memory_bytes=50 * KIB)))
    found = plan(chain(), small_first, microbatches=8, schedule="1f1b", recompute="never")
    assert ([one.name for one in found.devices], layers_of(found)) == (["full", "small"], [2, 2])


def test_memory_decides_between_schedules():
    graph = replace(chain(), hop_seconds=0.001)
    assert plan(graph, devices(2), microbatches=8, stages=2).schedule == "zb-h1"
    # To run some forwards twice costs less than the bubbles of schedules that hold less.
    tight = {"microbatches": 8, "stages": 2, "memory_bytes": 38 * KIB}
    found = plan(graph, devices(2), **tight)
    assert found.stages[0].recompute == "stage"
    same = plan(graph, devices(2), **tight, schedule="zb-h1")
    assert found.step_seconds <= same.step_seconds * 1.01
    never = plan(graph, devices(2), **tight, recompute="never")
    assert found.step_seconds < never.step_seconds


def test_too_little_memory_names_the_closest_plan_and_what_it_misses():
    with pytest.raises(PlanError) as caught:
        never = {"microbatches": 8, "stages": 2, "recompute": "never"}
        plan(chain(), devices(2), memory_bytes=20 * KIB, **never)
    assert str(caught.value) == (
        "no plan fits in memory; the closest, 2 stages with 1f1b, needs 32 KiB on rank 1 (d1), "
        "12 KiB over the 20 KiB allowed: allow that much more, or allow recomputing, and 2 stages "
        "with 1f1b and recompute fits (16 KiB on a rank)"
    )
    assert plan(chain(), devices(2), memory_bytes=32 * KIB, **never)
    heavy = chain(parameter_bytes=4 * KIB)
    with pytest.raises(PlanError, match=r"4 KiB over .* give it 4 devices like these, and 4 stag"):
        plan(heavy, devices(2), microbatches=8, stages=2, memory_bytes=24 * KIB)
    assert plan(heavy, devices(4), microbatches=8, memory_bytes=24 * KIB)
    with pytest.raises(PlanError, match="allow that much, or profile smaller microbatches"):
        plan(chain(), devices(2), microbatches=8, memory_bytes=KIB)


def test_more_devices_come_with_servers_whose_memory_is_as_small():
    server = Group(name="server", members=("d0", "d1"), memory_bytes=45 * KIB)
    heavy = chain(parameter_bytes=4 * KIB)
    # Two more devices in the same server do not help, two more servers do.
    with pytest.raises(
        PlanError, match="45 KiB allowed: allow that much more, or give it 4 devices like these"
    ):
        plan(heavy, replace(devices(2), groups=(server,)), microbatches=8)
    tiny = replace(devices(2), groups=(replace(server, memory_bytes=KIB),))
    with pytest.raises(PlanError, match="allow that much, or profile smaller"):
        plan(heavy, tiny, microbatches=8)


def test_smaller_microbatches_that_were_profiled_are_a_way_out():
    halves = replace(chain(activation_bytes=4 * KIB, held_input_bytes=0), microbatch_size=1)
    whole = replace(chain(), microbatch_size=2, other_sizes=(halves,))
    with pytest.raises(PlanError, match=r"take smaller microbatches, and .* fits"):
        plan(whole, devices(1), microbatches=8, memory_bytes=19 * KIB)
    assert plan(whole, devices(1), minibatch=16, memory_bytes=19 * KIB).microbatch_size == 1


def test_ranks_that_share_memory():
    cluster = Cluster(devices=devices(2).devices, memory_bytes=60 * KIB)
    never = plan(chain(), cluster, microbatches=8, recompute="never")
    assert (never.schedule, layers_of(never), sum(never.rank_bytes)) == ("1f1b", [1, 3], 54 * KIB)
    assert "92 KiB on all ranks together, which share memory, 32 KiB over" in never.reason
    found = plan(chain(), cluster, microbatches=8)
    # Only some stages run forward twice, which is faster than copies that both do so.
    assert {stage.recompute for stage in found.stages} > {"none"}
    assert sum(found.rank_bytes) <= 60 * KIB
    copies = plan(chain(), cluster, microbatches=8, replicas="2")
    assert copies.rank_bytes == (26 * KIB, 26 * KIB)
    assert found.step_seconds < copies.step_seconds < never.step_seconds
    tight = replace(cluster, memory_bytes=10 * KIB)
    with pytest.raises(PlanError, match=r"KiB on all ranks together.* KiB over the 10 KiB"):
        plan(chain(), tight, microbatches=8, stages=2)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"microbatches": 0}, InputError, "microbatches is 0, but must be ≥ 1"),
        ({"stages": 0}, InputError, "stages is 0"),
        ({"memory_bytes": -5}, InputError, "memory_bytes is -5"),
        ({"stages": 5}, PlanError, "4 layers cannot make 5 stages"),
        ({"stages": 3}, PlanError, r"3 stages on 2 device\(s\); ask for 1, 2, 4 or give a cluster"),
        ({"schedule": "1f1p"}, InputError, "no schedule is called '1f1p'; did you mean '1f1b'"),
    ],
)
def test_what_is_refused(request_, error, message):
    with pytest.raises(error, match=message):
        plan(chain(), devices(2), **{"microbatches": 4, **request_})


def picky(num_ranks, num_microbatches):
    raise InputError(f"picky wants 3 ranks, not {num_ranks}")


def test_a_family_that_refuses_is_skipped_unless_asked_for(monkeypatch):
    from penstock.core.schedule import families

    monkeypatch.setitem(families.FAMILIES, "picky", picky)
    assert plan(chain(), devices(2), microbatches=4).schedule == "1f1b"
    with pytest.raises(PlanError, match="picky wants 3 ranks"):
        search(chain(), devices(2), microbatches=4, schedule="picky")


def test_by_default_this_machine():
    found = plan(chain(), microbatches=2)
    assert found.num_ranks <= len(Cluster.local().devices)


PLAN = plan(chain(), devices(2), microbatches=8, schedule="1f1b")


def test_a_plan_in_print():
    lines = str(PLAN).splitlines()
    assert lines[0] == "1f1b: 2 stages on 2 ranks, 8 microbatches"
    assert _cells(lines, "layer2") == "1 2: layer2 … layer3 20 ms 40 ms 100% 22 KiB"
    assert _cells(lines, "× 1") == "1 2 KiB 2 KiB 18 KiB × 1"
    assert "optimizer" not in str(PLAN)  # it has none
    assert "gradients" in str(PLAN) and "gradients" not in PLAN.text(120, details=False)
    assert any(line.startswith("predicted: 540 ms a step, bubble 11.1%") for line in lines)
    assert any(line.startswith("rank 1 │") for line in lines)
    assert " ".join(lines[-2:]) == PLAN.reason
    assert "\x1b" not in str(PLAN)


def _cells(lines, part):
    """The row in which something stands, with single spaces."""
    return " ".join(next(line for line in lines if part in line).split())


def test_long_names_give_way_to_numbers():
    long = replace(chain(1).layers[0], name="transformer." * 20)
    lines = str(plan(LayerGraph(layers=(long,)), devices(1), microbatches=1)).splitlines()
    assert lines[3].rstrip().endswith("12 KiB")
    assert "…" in lines[3]
    assert max(map(len, lines)) <= 80


def test_what_a_plan_sums_up():
    assert PLAN.one_device_seconds == pytest.approx(8 * 4 * 0.03)
    assert PLAN.rank_bytes == tuple(stage.memory_bytes for stage in PLAN.stages)


STAGE = StagePlan(layers=("a",), rank=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": ()}, "no stages"),
        ({"stages": (replace(STAGE, layers=()),)}, "stage 0 has no layers"),
        ({"stages": (STAGE, replace(STAGE, rank=1))}, "layers a stand in more than one place"),
        (
            {"stages": (replace(STAGE, rank=1),)},
            "stage 0 is on rank 1, but 1 stage without replicas",
        ),
        (
            {"stages": (replace(STAGE, rank=1), replace(STAGE, layers=("b",)))},
            "stage 0 is on rank 1, but 1f1b runs it on rank 0",
        ),
        ({"schedule": "2f2b"}, "no schedule is called '2f2b'"),
        ({"options": {"colour": 1}}, "1f1b has no option colour"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"file_version": 3}, "version 3; this Penstock reads version 2"),
    ],
)
def test_a_plan_that_contradicts_itself(change, message):
    fields = {"model": "", "schedule": "1f1b", "num_microbatches": 2, "stages": (STAGE,)}
    with pytest.raises(InputError, match=message):
        Plan(**{**fields, **change})


def test_an_edited_plan_is_checked_when_it_is_read():
    tree = json.loads(PLAN.to_json())
    tree["stages"][0]["forward_seconds"] = -1
    with pytest.raises(FileError, match=r"forward_seconds is -1.*\$.stages\[0\]"):
        Plan.from_json(json.dumps(tree))


def test_a_plan_knows_its_model():
    names = [layer.name for layer in chain().layers]
    PLAN.check_model(names, chain().fingerprint)
    with pytest.raises(ModelError, match="not in the plan: extra; not in the model: none"):
        PLAN.check_model([*names, "extra"], PLAN.model)
    with pytest.raises(ModelError, match="order of the layers differs"):
        PLAN.check_model(names[::-1], PLAN.model)
    with pytest.raises(ModelError, match="other parameter shapes"):
        PLAN.check_model(names, "0" * 16)


def test_replicas_have_room_for_a_sum_and_each_adds_its_own_share():
    rate, count = 1e6, 4
    graph = replace(chain(parameter_bytes=100 * KIB), sum_bytes_per_second=rate)
    given = {"microbatches": 8, "replicas": (count,), "schedule": "1f1b"}
    (stage,) = plan(graph, devices(count), **given).stages
    assert stage.sum_bytes == stage.parameter_bytes == 400 * KIB
    assert stage.state_bytes == 3 * 400 * KIB
    assert stage.reduce_seconds == pytest.approx((count - 1) / count * 400 * KIB / rate)


def test_weights_tied_across_stages_are_summed_in_halves():
    first, *between, last = chain().layers
    shared = {"shared_parameters": {"embedding": KIB}}
    layers = (replace(first, **shared), *between, replace(last, **shared))
    link = Link(latency_seconds=1e-3, bytes_per_second=1e6)
    cluster = replace(devices(3), link=link)
    found = plan(LayerGraph(layers=layers), cluster, microbatches=8, schedule="1f1b", stages=3)
    assert [stage.sum_bytes for stage in found.stages] == [KIB, 0, KIB]
    assert [stage.reduce_seconds for stage in found.stages] == pytest.approx(
        [2e-3 + KIB / 1e6, 0, 2e-3 + KIB / 1e6]
    )


def test_tied_weights_that_are_old_cannot_be_parted():
    first, *between, last = chain().layers
    shared = {"shared_parameters": {"embedding": KIB}}
    graph = LayerGraph(layers=(replace(first, **shared), *between, replace(last, **shared)))
    with pytest.raises(PlanError, match=f"{first.name} and {last.name} share weights"):
        plan(graph, devices(3), microbatches=8, schedule="pipedream", stages=3)


def test_what_cannot_fit_is_refused_before_the_search():
    """Each schedule is built to see that it can be, and for the closest; none is for changes that
    would not help."""
    cluster, graph = devices(4), chain(8)
    task = Task(graph, cluster, 16)
    offered = len({*offers(task, Constraints()), *guided(task, Constraints())})
    with counting() as calls, pytest.raises(PlanError, match="allow that much"):
        plan(graph, cluster, microbatches=16, memory_bytes=100)
    assert calls["simulate"] == 0
    assert calls["build"] <= 2 * offered
