"""Trainings on accelerators, of whatever kind, beside the same ones elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock import versions
from penstock.demo import gpt
from tests.kit import streams
from tests.kit.examples import crossed
from tests.kit.helpers import make_batch, make_mlp, runnable_families
from tests.kit.one_device import assert_same
from tests.kit.tiny_models import conv_batch, gpt_batch, make_conv_net, make_gpt
from tests.kit.training import adamw, pipeline_of, sgd
from tests.numerics.test_one_logical_model_shared import TiedGPT, UNet, picture_batch, token_batch

NUM_STEPS = 4


@dataclass(frozen=True)
class Places:
    """Accelerators, and what trainings on them are compared with.

    Attributes:
        kind: as torch names it.
        count: how many there are, or are used.
        tolerance: how far numbers may be off; 0: equal to the bit.
        on_cpu: whether they are compared with the CPU; otherwise with one rank on one of them,
            since other kernels sum in other orders, and draw other numbers.
    """

    kind: str
    count: int
    tolerance: float = 0.0
    on_cpu: bool = True

    def of(self, *numbers: int) -> list[str]:
        """The names of accelerators; they begin anew behind the last one."""
        return [f"{self.kind}:{number % self.count}" for number in numbers]

    @property
    def optimizer(self) -> Any:
        """One that does not make much of differences in the last bit, where there are any."""
        return sgd if self.tolerance else adamw

    def reference(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a training whose result is the right one."""
        if self.on_cpu:
            return {**options, "devices": "cpu"}
        kept = {key: value for key, value in options.items() if key != "cuts"}
        return {**kept, "schedule": "1f1b", "num_ranks": 1, "devices": self.of(0)}

    def are_equal(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Whether two tensors in main memory are as equal as they must be."""
        return torch.allclose(ours, theirs, self.tolerance, self.tolerance)

    def assert_equal(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Two tensors in main memory are as equal as they must be."""
        limit = self.tolerance
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit, equal_nan=False)


EMULATED = Places("emu", 4)


def hardware(kind: str, count: int) -> Places:
    """Real accelerators. In single precision, sums in another order differ in the last bits."""
    return Places(kind, count, tolerance=1e-4, on_cpu=False)


def on_cpu(values):
    return [value.cpu() for value in values]


def trained(build, batch, *, rows=8, **options):
    """The model, the losses and the outputs of an evaluation; half of the steps overlap."""
    model = build()
    batches = [batch(rows, seed=seed) for seed in range(NUM_STEPS)]
    with pipeline_of(model, **{"loss": F.cross_entropy, **options}) as pipeline:
        half = NUM_STEPS // 2
        losses = [pipeline.step(*batch) for batch in batches[:half]]
        losses += pipeline.steps(batches[half:])
        outputs = pipeline.evaluate(batches[0][0])
    return model, torch.stack(on_cpu(losses)), outputs.cpu()


def assert_right(places, build, batch, devices, **options):
    """A training gives what it must; gives the model that was trained on the devices."""
    options = {"optimizer": places.optimizer, **options}
    theirs, expected, its_outputs = trained(build, batch, **places.reference(options))
    ours, losses, outputs = trained(build, batch, devices=devices, **options)
    assert expected.isfinite().all()
    places.assert_equal(losses, expected)
    places.assert_equal(outputs, its_outputs)
    assert_same(ours, theirs, places.tolerance)
    return ours


NETS = {
    "gpt": (make_gpt, gpt_batch, gpt.loss),
    "convolutional": (make_conv_net, conv_batch, F.cross_entropy),
}
FAMILIES = crossed(runnable_families(), NETS)
"""(schedule, net)"""


def check_family(places, devices, schedule, net):
    """A schedule on four ranks."""
    build, batch, loss = NETS[net]
    if schedule == "chimera" and build is make_conv_net:
        build = partial(make_conv_net, statistics=False)
    options = {"schedule": schedule, "num_ranks": 4, "num_microbatches": 8, "rows": 16}
    assert_right(places, build, batch, devices, loss=loss, **options)


def dropping():
    return make_mlp(dropout=0.3)


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 4)
    )


FEATURES = [
    (dropping, {}),
    (dropping, {"clip_norm": 0.05}),
    (dropping, {"clip_norm": 0.05, "post_validate": True}),
    (dropping, {"recompute": "layers"}),
    (dropping, {"recompute": "stage"}),
    (normalised, {"batch_norm": "minibatch"}),
    (dropping, {"count_memory": True}),
]
"""(model, options), for ``make_batch`` and two ranks."""


def check_feature(places, devices, schedule, build, options):
    """Something that a pipeline may be asked for."""
    assert_right(places, build, make_batch, devices, schedule=schedule, **options)


def check_tied(places, devices, schedule):
    """A tied weight and skips between two ranks."""
    options = {"schedule": schedule, "num_ranks": 2, "num_microbatches": 4}

    def loss(output, targets):
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    assert_right(places, TiedGPT, token_batch, devices, loss=loss, **options)
    assert_right(places, UNet, picture_batch, devices, loss=F.mse_loss, **options)


def scaled(devices, num_ranks=2):
    """A model trained under autocast with a loss scale, and its losses."""
    model = make_mlp(0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    kind = torch.device(devices[0]).type
    options = {"optimizer": sgd, "grad_scaler": scaler, "devices": devices}
    with pipeline_of(model, num_ranks=num_ranks, **options) as pipeline:
        losses = []
        for step in range(3):
            with torch.autocast(kind, torch.bfloat16):
                losses.append(pipeline.step(*make_batch(seed=step)))
    return model, torch.stack(on_cpu(losses))


def check_scaling(places, devices):
    """Autocast and a loss scale."""
    there = (["cpu", "cpu"], 2) if places.on_cpu else (places.of(0), 1)
    (theirs, expected), (ours, losses) = scaled(*there), scaled(devices)
    places.assert_equal(losses, expected)
    assert_same(ours, theirs, places.tolerance)


POLICIES = [
    (versions.Stash(), None),
    (versions.DoubleBuffer(), None),
    (versions.PipeMare(t1=5, t2=0.3), None),
    (versions.Predict(), None),
    (versions.VerticalSync(), None),
    (versions.Stash(), "2-1"),
]
"""(policy, replicas), for three ranks."""


def check_policy(places, devices, policy, replicas):
    """Training without a flush: what it computes is a matter of the plan, so there is no other one
    to compare with."""
    plan = streams.plan_for(policy, 3, microbatches=4, replicas=replicas)
    found = []
    for where in ("cpu" if places.on_cpu else places.of(0)[0], devices[: plan.num_ranks]):
        model = streams.layered_model()
        options = {"loss": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.01), "seed": 3}
        with pk.Pipeline(model, plan, devices=where, **options) as pipeline:
            losses = on_cpu(pipeline.steps(streams.batches([8] * 5)))
        found.append((model, torch.stack(losses)))
    (theirs, expected), (ours, losses) = found
    places.assert_equal(losses, expected)
    assert_same(ours, theirs, places.tolerance)
