"""What is said to whoever gives an argument, or asks for a name, that is not there."""

import inspect

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.base.arguments import public
from tests.kit.helpers import make_plan
from tests.kit.planning import chain, devices

WORDS = [
    (lambda: pk.plan(chain(), devices(2), num_microbatches=4), "microbatches=…"),
    (lambda: pk.plan(chain(), devices(2), n_microbatches=4), "microbatches=…"),
    (lambda: pk.plan(chain(), devices(2), chunks=4), "microbatches=…"),
    (lambda: pk.plan(chain(), devices(2), num_stages=2), "stages=…"),
    (lambda: pk.plan(chain(), devices(2), shedule="1f1b"), "schedule=…"),
    (lambda: pk.plan(chain(), devices(2), ranks=2), r"pk\.Cluster\.local"),
    (lambda: pk.plan(chain(), devices(2), nonsense=2), "it has graph, cluster, microbatches"),
    (lambda: pk.profile(nn.Linear(2, 2), torch.ones(2, 2), criterion=None), "loss=…"),
    (lambda: pk.Pipeline(None, None, criterion=None), "loss=…"),
    (lambda: pk.Pipeline(None, None, lr=0.1), "optimizer=lambda parameters: .*lr="),
    (lambda: pk.Pipeline(None, None, optimizer_kwargs={}), "optimizer=lambda parameters"),
    (lambda: pk.Pipeline(None, None, mp_policy=None), "pk.optimizers.master_weights"),
    (lambda: pk.Pipeline(None, None, microbatches=4), r"the plan says it: pk\.plan"),
    (lambda: pk.Pipeline(None), r"lacks plan; call it as Pipeline\(model, plan, …\)"),
    (lambda: pk.profile(nn.Linear(2, 2), torch.ones(2, 2), device="cpu"), r"pk\.estimate"),
    (
        lambda: pk.estimate(None, None),
        r"lacks device; call it as estimate\(model, inputs, device=…",
    ),
    (lambda: pk.estimate(None, None, devise="h100"), "give device=…"),
    (lambda: pk.estimate(None, None, cluster=None), "the cluster to pk.plan"),
    (lambda: pk.Cluster.of("h100", host=2), "give hosts=…"),
    (lambda: pk.Cluster.of("h100", num_devices=2), "devices_per_host=…"),
    (pk.Cluster.of, r"lacks name; call it as Cluster\.of\(name, …\)"),
    (pk.simulate, "lacks schedule"),
    (lambda: pk.draw(None, None, None, None, None), "takes .* but was given 5"),
    (lambda: pk.plan(chain(), graph=chain()), "was given graph twice"),
    (lambda: pk.Device(nme="a"), "give name=…"),
    (pk.Device, "lacks name=…"),
]


@pytest.mark.parametrize(("call", "cue"), WORDS, ids=[cue for _, cue in WORDS])
def test_a_wrong_argument_brings_a_cue(call, cue):
    with pytest.raises(pk.InputError, match=cue) as refused:
        call()
    assert isinstance(refused.value, TypeError)


@pytest.fixture(scope="module")
def pipeline():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pk.Pipeline(model, make_plan(model, 2, 4), loss=nn.functional.mse_loss) as made:
        yield made


def test_a_batch_is_one_value(pipeline):
    batch = torch.ones(4, 2)
    with pytest.raises(TypeError, match=r"'input_ids', 'labels': .*step\(batch\) for a mapping"):
        pipeline.step(input_ids=batch, labels=batch)
    with pytest.raises(TypeError, match="takes inputs and targets, but was given 3 values"):
        pipeline.step(batch, batch, batch)
    with pytest.raises(TypeError, match=r"no argument 'labels': give targets=…"):
        pipeline.step(batch, labels=batch)
    with pytest.raises(TypeError, match="'input_ids', 'mask': the inputs are one value"):
        pipeline.evaluate(input_ids=batch, mask=batch)


def test_a_list_of_optimizers_is_not_there(pipeline):
    with pytest.raises(pk.InputError, match=r"by_stage\[stage\]\[0\]"):
        pipeline.optimizers[0]


@pytest.mark.parametrize(
    ("name", "meant"), [("Pipline", "Pipeline"), ("LayersGraph", "LayerGraph"), ("Palan", "Plan")]
)
def test_a_near_name_is_said(name, meant):
    with pytest.raises(pk.InputError, match=rf"no attribute '{name}'.* {meant}") as refused:
        getattr(pk, name)
    assert isinstance(refused.value, AttributeError)
    assert not hasattr(pk, name)


def test_a_near_name_of_a_pipeline_is_said(pipeline):
    with pytest.raises(AttributeError, match="no optimiser; it has optimizers"):
        _ = pipeline.optimiser


def test_a_type_error_from_inside_stays_what_it_is():
    @public()
    def adds(number, *, other=1):
        return number + other

    assert adds(1) == 2
    with pytest.raises(TypeError, match="unsupported operand") as raised:
        adds(None)
    assert not isinstance(raised.value, pk.InputError)


def test_signatures_can_be_read():
    assert list(inspect.signature(pk.Pipeline).parameters)[:3] == ["model", "plan", "loss"]
    assert "microbatches" in inspect.signature(pk.plan).parameters
    assert list(inspect.signature(pk.Pipeline.step).parameters) == [
        "self", "inputs", "targets", "update", "share",
    ]  # fmt: skip
    assert "Train on one minibatch" in pk.Pipeline.step.__doc__
