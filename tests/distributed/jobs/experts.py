"""Copies of stages that divide the experts of their mixtures, beside one device.

    torchrun ... experts.py CASE FOLDER

Cases: ``own`` trains mixtures of one's own in float64, over schedules, options and routings, also
with experts that get no token and with a capacity; ``transformers`` those of that library;
``checkpoint`` goes on from one layout in another; ``refusals`` asks for what cannot be; ``held``
weighs what ranks keep; in ``VICTIM dies`` a rank ends while tokens travel. Each rank reports in
``report-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.planning.plans import Plan
from tests.kit.helpers import make_batch
from tests.kit.mixtures import (
    KINDS,
    ListedExperts,
    StackedExperts,
    make_mixture,
    make_tokens,
    make_transformer,
    next_word_loss,
)
from tests.kit.one_device import OneDevice
from tests.kit.reducing import replicated
from tests.kit.training import adamw

STEPS = 3
DOUBLE = torch.float64


def plan_for(
    model: nn.Module, replicas: tuple[int, ...], size: int, *, schedule="1f1b", recompute="none"
) -> Plan:
    plan = replicated(model, replicas, 2 * max(replicas))
    stages = [replace(stage, recompute=recompute) for stage in plan.stages]
    plan = replace(plan, schedule=schedule, stages=tuple(stages))
    return plan.with_expert_ranks(size)


def pipeline_of(plan: Plan, model: nn.Module, **options) -> pk.Pipeline:
    return pk.Pipeline(
        model, plan, **{
            "loss": F.cross_entropy, "optimizer": adamw, "seed": 1,
            "deadline_seconds": 20, "startup_seconds": 30, **options,
        },
    )  # fmt: skip


def far_from_one_device(plan: Plan, make, batches, **options) -> float:
    """How far losses, outputs and weights are from those of one device, at most."""
    model, alone = make(), make()
    if dist.get_rank():
        nn.init.zeros_(next(model.parameters()))  # the first copy's values count
    theirs = {key: made() if callable(made) else made for key, made in options.items()}
    ours = {key: made() if callable(made) else made for key, made in options.items()}
    reference = OneDevice(alone, plan.num_microbatches, optimizer=adamw, **theirs)
    far = 0.0
    with pipeline_of(plan, model, **ours) as pipeline:
        for step, batch in enumerate(batches):
            updates = step != 1  # the gradients of two minibatches make one update
            loss = pipeline.step(*batch, update=updates)
            wanted = reference.step(*batch, update=updates)
            far = max(far, abs(loss - wanted).item())
            with torch.no_grad():
                there = torch.cat([alone(part) for part in reference.cut(batch[0])])
            far = max(far, (pipeline.evaluate(batch[0]) - there).abs().max().item())
        state = pipeline.gather_state_dict()
    wanted_state = alone.state_dict()
    if state.keys() != wanted_state.keys():
        return float("inf")
    differences = ((state[key] - own).abs().max().item() for key, own in wanted_state.items())
    return max([far, *differences])


def own() -> list[str]:
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=64.0)
    cases = {
        "all copies": ((4,), 4, {}, {}, {}),
        "two stages": ((2, 2), 2, {}, {}, {"clip_norm": 0.1}),
        "two groups": ((4,), 2, {}, {}, {"clip_norm": 0.1}),
        "gpipe, again": ((2, 2), 2, {}, {"schedule": "gpipe", "recompute": "stage"}, {}),
        "layers again": ((4,), 4, {}, {"recompute": "layers"}, {"grad_scaler": scaler}),
        "idle": ((2, 2), 2, {"idle": (0, 1)}, {}, {"clip_norm": 0.1}),
        "capacity": ((4,), 4, {"capacity": 2}, {}, {}),
        "one choice": ((4,), 2, {"choices": 1, "num_experts": 8}, {}, {}),
        "listed": ((2, 2), 2, {"experts": ListedExperts}, {}, {"clip_norm": 0.1}),
        "listed, idle": ((4,), 4, {"experts": ListedExperts, "idle": (3,)}, {}, {}),
        "listed, groups": ((4,), 2, {"experts": ListedExperts}, {}, {}),
    }
    report = []
    for name, (replicas, size, options, planned, training) in cases.items():
        make = partial(make_mixture, **{"experts": StackedExperts, **options})
        plan = plan_for(make(), replicas, size, **planned)
        batches = [make_batch(24, DOUBLE, step) for step in range(STEPS)]
        reducers = ("owners", "sharded") if size == max(replicas) else ("owners",)
        for reducer in reducers:
            far = far_from_one_device(plan.with_reducer(reducer), make, batches, **training)
            if not far <= 1e-12:
                report.append(f"{name}, {reducer}: {far}")
    return report


def from_transformers() -> list[str]:
    report = []
    for kind in KINDS:
        for implementation in ("eager", "grouped_mm"):
            model, alone = (make_transformer(kind, implementation=implementation) for _ in range(2))
            captured = pk.capture(model, {"input_ids": make_tokens(2)})
            plan = plan_for(captured, (2, 2), 2)
            reference = OneDevice(alone, 4, loss=next_word_loss, optimizer=adamw)
            far = 0.0
            with pipeline_of(plan, captured, loss=next_word_loss) as pipeline:
                for step in range(STEPS):
                    tokens = make_tokens(8, step)
                    loss = pipeline.step({"input_ids": tokens}, tokens)
                    far = max(far, abs(loss - reference.step(tokens, tokens)).item())
                state = pipeline.gather_state_dict()
            for key, value in alone.state_dict().items():
                far = max(far, (state[key] - value).abs().max().item())
            if not far <= 1e-12:
                report.append(f"{kind}, {implementation}: {far}")
    return report


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[-1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compares = {"own": own, "transformers": from_transformers}
    report = compares[case]()
    (folder / f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
