"""Plans whose ranks are groups of devices that share layers."""

import pytest
from msgspec.structs import replace

from penstock import Cluster, Device, Layer, LayerGraph, Link, plan
from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Group
from penstock.planning.plans import Plan
from tests.kit.planning import KIB, chain, devices

FAST = Link(bytes_per_second=1e9)


def large_layers(count=4):
    """Linear layers with few rows: their gradients are large, their outputs small."""
    return LayerGraph(
        microbatch_size=4,
        input_bytes=4 * KIB,
        layers=tuple(
            Layer(
                name=f"layer{index}",
                kind="Linear",
                forward_seconds=0.01,
                backward_input_seconds=0.01,
                backward_weight_seconds=0.01,
                activation_bytes=4 * KIB,
                output_bytes=4 * KIB,
                parameter_bytes=4096 * KIB,
                optimizer_bytes=8192 * KIB,
                signature="weight:1024x1024:float32",
            )
            for index in range(count)
        ),
    )


def four(**fields):
    return replace(devices(4, **fields), link=FAST)


def test_a_plan_names_all_devices_and_the_split_of_every_layer():
    found = plan(large_layers(), four(), microbatches=4, tensor_ranks=2, stages=2, schedule="1f1b")
    assert (found.num_tensor_ranks, found.num_ranks, len(found.stages)) == (2, 2, 2)
    assert [one.name for one in found.devices] == ["d0", "d1", "d2", "d3"]
    for stage in found.stages:
        assert set(stage.splits) == set(stage.layers)
    assert Plan.from_json(found.to_json()) == found
    assert "layers over 2 devices" in found.reason


def test_any_number_of_tensor_ranks_is_at_least_as_fast_as_each():
    request = {"microbatches": 2}
    free = plan(large_layers(), four(), tensor_ranks="any", **request)
    for width in (1, 2, 4):
        forced = plan(large_layers(), four(), tensor_ranks=width, **request)
        assert forced.num_tensor_ranks == width
        assert len(forced.devices) == forced.num_ranks * width
        assert free.step_seconds <= forced.step_seconds * 1.01
    assert "split layers" in {one.label for one in free.alternatives}


def test_unasked_no_layer_is_split():
    found = plan(large_layers(), four(), microbatches=2)
    assert found.num_tensor_ranks == 1
    assert not any(stage.splits for stage in found.stages)


def test_split_layers_need_less_memory_of_each_device():
    whole = plan(large_layers(), four(), microbatches=1, stages=1, tensor_ranks=1)
    split = plan(large_layers(), four(), microbatches=1, stages=1, tensor_ranks=4)
    assert max(split.rank_bytes) < max(whole.rank_bytes)
    tight = four(memory_bytes=max(whole.rank_bytes) - 1)
    with pytest.raises(PlanError, match="no plan fits in memory"):
        plan(large_layers(), tight, microbatches=1, stages=1, recompute="never")
    fits = plan(large_layers(), tight, microbatches=1, stages=1, tensor_ranks="any")
    assert fits.num_tensor_ranks > 1


def test_a_group_is_as_slow_and_as_small_as_its_weakest_device():
    uneven = Cluster(
        link=FAST,
        devices=(
            Device(name="a", speed=4.0),
            Device(name="b", memory_bytes=32 * KIB),
        ),
    )
    found = plan(chain(), uneven, microbatches=2, tensor_ranks=2)
    assert [one.name for one in found.devices] == ["a", "b"]
    assert max(found.rank_bytes) <= 32 * KIB
    third = Device(name="c", speed=2.0, memory_bytes=64 * KIB)
    more = plan(
        chain(), replace(uneven, devices=(*uneven.devices, third)), microbatches=2, tensor_ranks=2
    )
    # One has no partner: the slowest, wherever it is listed.
    assert sorted(device.name for device in more.devices) == ["a", "c"]


@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
def test_links_are_as_fast_beside_slow_devices(speed):
    """Of a stage's seconds, those that compute are divided by the speed, and collectives not."""
    link = Link(latency_seconds=1e-3, bytes_per_second=1e7)
    options = {"microbatches": 2, "tensor_ranks": 2, "stages": 1}

    def stage_on(speed, link=link, pace=1.0):
        graph = LayerGraph(
            microbatch_size=4,
            input_bytes=4 * KIB,
            layers=tuple(layer.paced(pace, pace) for layer in large_layers().layers),
        )
        return plan(graph, replace(devices(2, speed=speed), link=link), **options).stages[0]

    # The same devices, as a profile that was measured on one of them says it.
    slow, same = stage_on(speed), stage_on(1.0, pace=1 / speed)
    for name in ("forward_seconds", "backward_input_seconds", "backward_weight_seconds"):
        assert getattr(slow, name) == pytest.approx(getattr(same, name))
    assert slow.update_seconds == pytest.approx(same.update_seconds)
    assert slow.splits == same.splits
    free = stage_on(speed, Link())
    assert slow.forward_seconds + slow.backward_input_seconds > (
        free.forward_seconds + free.backward_input_seconds
    )


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 0.25, 1.0), (4.0, 4.0, 1.0, 2.0)])
def test_one_slow_device_computes_longer_and_sends_no_longer(speeds):
    options = {
        "microbatches": 2, "tensor_ranks": 2, "stages": 2, "cuts": ["layer2"], "schedule": "1f1b",
    }  # fmt: skip

    def stages(speeds, link):
        parts = [Device(name=f"d{k}", speed=speed) for k, speed in enumerate(speeds)]
        return plan(large_layers(), Cluster(devices=tuple(parts), link=link), **options).stages

    def sent(speeds):
        """Seconds of collectives by stage: what a plan takes longer than one with free links."""
        pairs = zip(stages(speeds, Link(bytes_per_second=1e7)), stages(speeds, Link()), strict=True)
        return [
            (with_links.forward_seconds - free.forward_seconds,
             with_links.backward_input_seconds - free.backward_input_seconds)
            for with_links, free in pairs
        ]  # fmt: skip

    expected = sent([min(speeds)] * 4)
    assert min(map(min, expected)) >= 0
    assert max(map(max, expected)) > 0
    for ours, theirs in zip(sent(speeds), expected, strict=True):
        assert ours == pytest.approx(theirs)


def test_devices_that_share_memory_hold_a_part_each():
    for shared in (
        replace(four(), memory_bytes=20_000 * KIB),
        replace(
            four(),
            groups=(
                Group(
                    name="host",
                    members=("d0", "d1", "d2", "d3"),
                    link=FAST,
                    memory_bytes=20_000 * KIB,
                ),
            ),
        ),
    ):
        with pytest.raises(PlanError, match="share"):
            plan(large_layers(), shared, microbatches=2, tensor_ranks=4)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (8, PlanError, "layers cannot be split over 8 devices: the cluster has 4"),
        (0, InputError, "tensor_ranks is 0; give a whole number ≥ 1 or 'any'"),
        ("two", InputError, "tensor_ranks is 'two'"),
        (2.0, InputError, "tensor_ranks is 2.0"),
    ],
)
def test_what_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        plan(large_layers(), four(), microbatches=2, tensor_ranks=given)


def test_splits_of_layers_that_are_not_there_are_refused():
    found = plan(large_layers(), four(), microbatches=2, tensor_ranks=2)
    stage = replace(found.stages[0], splits={"layer9": "column"})
    with pytest.raises(InputError, match="splits has 'layer9', which is no layer of this stage"):
        replace(found, stages=(stage, *found.stages[1:]))
