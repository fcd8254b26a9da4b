"""What the planner finds for any number of tensor ranks runs as it is, and trains as one device."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.demo import gpt
from penstock.trial import Workload, prove
from tests.kit.groups import WORDS, net_batch, net_loss

FAST = pk.Link(bytes_per_second=1e12)


def small_alexnet():
    """Every kind of layer of which the planner and the runtime must think alike."""
    torch.manual_seed(0)
    computed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    return nn.Sequential(
        *[nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU()],
        *[nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Conv2d(8, 12, 3, padding=1, groups=2)],
        *[nn.GroupNorm(2, 12), nn.PReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout()],
        *[nn.Linear(48, 32), nn.ReLU(), nn.Dropout(), computed, nn.RReLU(), nn.Linear(32, 10)],
    )


def encoder():
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(8, 4, 16, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, 8, max_norm=1.0), *blocks, nn.Linear(8, WORDS))


def small_gpt():
    torch.manual_seed(0)
    return gpt.GPT(vocabulary=WORDS, width=8, heads=2, layers=2, context=4, dropout=0.1)


def pictures(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(
        0, 10, (8,), generator=generator
    )


MODELS = {
    "pictures": (small_alexnet, pictures, F.cross_entropy),
    "encoder": (encoder, lambda seed: net_batch(8, seed), net_loss),
    "gpt": (small_gpt, lambda seed: net_batch(8, seed), net_loss),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_with_any_tensor_ranks_is_proven(name):
    build, batch, loss = MODELS[name]
    graph = pk.profile(build(), batch(0)[0][:4], repeats=1)
    devices = tuple(pk.Device(name=f"device{index}") for index in range(4))
    cluster = pk.Cluster(devices=devices, link=FAST)
    work = Workload(
        build_model=build,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batches=lambda: (batch(seed) for seed in itertools.count()),
    )
    wanted = 2 if name == "encoder" else "any"
    plan = pk.plan(graph, cluster, microbatches=2, stages=1, tensor_ranks=wanted)
    assert plan.num_tensor_ranks > 1
    proof = prove(work, plan, num_steps=2, float64=True)
    assert proof.equal, proof.verdict
    said = {how for stage in plan.stages for how in stage.splits.values()}
    assert {"pictures": "data", "encoder": "heads", "gpt": "row"}[name] in said


def with_costs(graph):
    """As of a large VGG with one row in a microbatch: convolutions compute and give much, linear
    layers have parameters."""
    times = {"Conv2d": 0.04, "Linear": 0.01}
    layers = []
    for layer in graph.layers:
        seconds = times.pop(layer.kind, 1e-4)
        layers.append(
            replace(
                layer,
                forward_seconds=seconds,
                backward_input_seconds=seconds,
                backward_weight_seconds=seconds,
                recompute_seconds=None,
                output_bytes=1000 if layer.kind in ("Flatten", "Linear") else 10**7,
                parameter_bytes=5 * 10**7 if layer.kind == "Linear" else layer.parameter_bytes,
            )
        )
    return replace(graph, layers=tuple(layers), contention=type(graph.contention)())


def test_replicas_of_convolutions_and_one_group_for_linear_layers_are_found_and_proven():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(
            *[nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()],
            *[nn.Linear(64, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, 10)],
        )

    def batch(seed):
        return tuple(
            torch.cat(pair)[:10] for pair in zip(pictures(seed), pictures(seed + 1), strict=True)
        )

    graph = with_costs(pk.profile(build(), batch(0)[0][:1], repeats=1))
    devices = tuple(pk.Device(name=f"device{index}") for index in range(7))
    cluster = pk.Cluster(devices=devices, link=pk.Link(bytes_per_second=1e8))
    plan = pk.plan(graph, cluster, microbatches=10, tensor_ranks="any")
    assert (plan.replicas, plan.group_sizes) == ((5, 1), (1, 1, 1, 1, 1, 2))
    front, back = plan.stages
    assert front.splits == {} and front.layers[-1] == "4"
    assert back.splits["5"] in ("column", "row")
    assert len(plan.devices) == plan.num_seats == 7
    assert "the last one's layers over 2 devices" in plan.reason
    rivals = {one.label: one.step_seconds for one in plan.alternatives}
    assert plan.step_seconds == rivals["split layers"] < rivals["data parallel"]
    work = Workload(
        build_model=build,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batches=lambda: (batch(seed) for seed in itertools.count()),
    )
    proof = prove(work, plan, num_steps=2, float64=True)
    assert proof.equal, proof.verdict
