"""The same training on other devices: what decides the losses stays, and all devices are used."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

import penstock as pk
from penstock.base.errors import InputError, ModelError, PlanError
from tests.kit.examples import in_turns
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.planning import chain, devices


@pytest.fixture(scope="module")
def graph():
    return pk.profile(make_mlp(), make_batch(4)[0], repeats=1, ranks=0)


@pytest.mark.parametrize(
    ("schedule", "count", "with_graph"),
    in_turns(itertools.product(["gpipe", "zb-h1"], [1, 2, 3, 4], [True, False]), 3),
)
def test_every_device_is_used_and_the_minibatch_stays(graph, schedule, count, with_graph):
    old = pk.plan(graph, devices(3), microbatches=6, schedule=schedule, stages=3)
    new = pk.replan(old, devices(count), graph if with_graph else None)
    assert new.num_ranks == count
    assert (new.num_microbatches, new.microbatch_size, new.model) == (6, 4, old.model)
    assert [name for stage in new.stages for name in stage.layers] == [
        layer.name for layer in graph.layers
    ]
    assert new.schedule == schedule


def test_a_plan_knows_its_stages_to_the_byte():
    graph = chain(8, parameter_bytes=1001)
    old = pk.plan(graph, devices(4), microbatches=4, schedule="1f1b", stages=4)
    (whole,) = pk.replan(old, devices(1)).stages
    assert whole.parameter_bytes == sum(stage.parameter_bytes for stage in old.stages) == 8008
    assert whole.forward_seconds == pytest.approx(sum(one.forward_seconds for one in old.stages))


def test_seconds_are_those_of_other_devices():
    old = pk.plan(chain(8), devices(4, speed=2.0), microbatches=4, schedule="1f1b", stages=4)
    (whole,) = pk.replan(old, devices(1, speed=0.5)).stages
    assert whole.forward_seconds == pytest.approx(8 * 0.01 / 0.5)


def test_a_schedule_that_is_not_there_for_so_many_devices_becomes_1f1b():
    old = pk.plan(chain(8), devices(4), microbatches=8, schedule="interleaved-1f1b", stages=8)
    assert pk.replan(old, devices(2)).schedule == "interleaved-1f1b"
    assert pk.replan(old, devices(8)).schedule == "1f1b"


def test_replicas_are_given_up():
    old = pk.plan(chain(4), devices(4), microbatches=4, schedule="1f1b", replicas=(2, 2))
    new = pk.replan(old, devices(3))
    assert new.replicas == (1, 1, 1)


def test_what_cannot_go_on_elsewhere_is_refused(graph):
    old = pk.plan(graph, devices(2), microbatches=4, schedule="1f1b", stages=2)
    with pytest.raises(PlanError, match="cannot make 7 stages"):
        pk.replan(old, devices(7))
    with pytest.raises(PlanError):
        pk.replan(old, devices(2), memory_bytes=1)
    with pytest.raises(ModelError, match="another model"):
        pk.replan(replace(old, model="0" * 16), devices(1), graph)
    late = pk.plan(graph, devices(2), microbatches=4, schedule="pipedream", stages=2)
    with pytest.raises(InputError, match="learns something else"):
        pk.replan(late, devices(1))
    with pytest.raises(InputError, match="the cluster"):
        pk.replan(old, 2)


def test_training_goes_on_with_the_losses_of_the_old_plan(graph, tmp_path):
    """Three ranks train, one of them is lost, and two go on from the checkpoint."""

    def pipeline(plan):
        return pk.Pipeline(
            make_mlp(), plan, loss=F.cross_entropy, optimizer=torch.optim.AdamW, seed=5
        )

    def train(on, steps):
        return [on.step(*make_batch(24, seed=step)).item() for step in steps]

    old = pk.plan(graph, devices(3), microbatches=6, schedule="1f1b", stages=3)
    with pipeline(old) as whole:
        expected = train(whole, range(6))
    with pipeline(old) as before:
        assert train(before, range(3)) == expected[:3]
        before.save(tmp_path / "run")
    with pipeline(pk.replan(old, devices(2))) as after:
        assert after.load(tmp_path / "run") == 3
        assert train(after, range(3, 6)) == expected[3:]
