"""Copies of stages that divide the experts of their mixtures, beside one device.

    torchrun ... experts.py CASE FOLDER

Cases: ``own`` trains mixtures of one's own in float64, over schedules, options and routings, also
with experts that get no token and with a capacity, ``own in every way`` with every reducer;
``split`` has backwards in two halves; ``transformers`` trains those of that library;
``checkpoint`` goes on from one layout in another; ``refusals`` and ``other ways`` ask for what
cannot be; ``held`` weighs what ranks keep; in ``VICTIM dies`` a rank ends while tokens travel. Each
rank reports in ``report-<rank>.json``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.base.errors import PenstockError
from penstock.planning.plans import Plan
from tests.kit.cases import run_case
from tests.kit.copies_in_job import (
    DOUBLE,
    AllRanks,
    backward_in_halves,
    far_from_one_device,
    going_on,
    not_refused,
)
from tests.kit.helpers import make_batch, make_plan
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
from tests.kit.sharing import spread
from tests.kit.training import pipeline_of_job, sgd

STEPS = 3


def plan_for(
    model: nn.Module, replicas: tuple[int, ...], size: int, *, schedule="1f1b", recompute="none"
) -> Plan:
    plan = replicated(model, replicas, 2 * max(replicas))
    stages = [replace(stage, recompute=recompute) for stage in plan.stages]
    plan = replace(plan, schedule=schedule, stages=tuple(stages))
    return plan.with_expert_ranks(size)


def own(*, every: bool = False) -> list[str]:
    """Beside one device. Where both reducers can be, cases take turns, unless every way is asked
    for."""
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
    chimera = make_plan(make_mixture(), 4, 8, "chimera", cuts=[1, 3, 4])
    far = far_from_one_device(chimera.with_expert_ranks(2, [1, 3]), make_mixture, STEPS, {})
    if not far <= 1e-12:
        report.append(f"chimera: {far}")
    for turn, (name, (replicas, size, options, planned, training)) in enumerate(cases.items()):
        make = partial(make_mixture, **{"experts": StackedExperts, **options})
        plan = plan_for(make(), replicas, size, **planned)
        reducers = ["owners", "sharded"] if size == max(replicas) else ["owners"]
        if not every and "all" not in name:
            reducers = reducers[turn % len(reducers) :][:1]
        for reducer in reducers:
            far = far_from_one_device(plan.with_reducer(reducer), make, STEPS, training)
            if not far <= 1e-12:
                report.append(f"{name}, {reducer}: {far}")
    return report


def split() -> list[str]:
    """Backwards in two halves, with several microbatches under way, on a stage alone."""
    report = []
    for experts in (StackedExperts, ListedExperts):
        model, alone = make_mixture(experts), make_mixture(experts)
        stage = backward_in_halves(
            model, alone, lambda stage: stage.divide_experts(AllRanks(), AllRanks())
        )
        wanted_of = dict(alone.named_parameters())
        whole = {id(parameter): name for name, parameter in model.named_parameters()}
        for own in stage.experts.weights:
            theirs = wanted_of[whole[id(own.whole)]].grad
            rows = theirs[own.start : own.start + len(own.rows)]
            if own.is_here and not torch.allclose(own.rows.grad, rows, rtol=0, atol=1e-12):
                report.append(f"{whole[id(own.whole)]} of {experts.__name__}")
        norms = torch.stack(stage.experts.norms())
        theirs = [wanted_of[whole[id(own.whole)]].grad.norm() for own in stage.experts.weights]
        if not torch.allclose(norms, torch.stack(theirs), rtol=1e-12):
            report.append(f"{norms} {theirs}")
    return report


def from_transformers() -> list[str]:
    """Mixtures of that library; what cannot run in float64 runs in float32."""
    report = []
    ways = [(kind, "eager", DOUBLE, 1e-12) for kind in KINDS]
    for kind, implementation, dtype, tolerance in [
        *ways,
        ("Mixtral", "grouped_mm", torch.float32, 1e-4),
    ]:
        model, alone = (
            make_transformer(kind, dtype=dtype, implementation=implementation, num_layers=1)
            for _ in range(2)
        )
        captured = pk.capture(model, {"input_ids": make_tokens(2)}, verify=False)
        plan = plan_for(captured, (2,), 2)
        reference = OneDevice(alone, 4, loss=next_word_loss, optimizer=sgd)
        far = 0.0
        with pipeline_of_job(plan, captured, loss=next_word_loss, optimizer=sgd) as pipeline:
            for step in range(STEPS):
                tokens = make_tokens(8, step)
                loss = pipeline.step({"input_ids": tokens}, tokens)
                far = max(far, abs(loss - reference.step(tokens, tokens)).item())
            state = pipeline.gather_state_dict()
            there = pipeline.stages[0].experts.weights
        for key, value in alone.state_dict().items():
            far = max(far, (state[key] - value).abs().max().item())
        if not far <= tolerance or len(there) != 2:
            report.append(f"{kind}, {implementation}: {far}, {len(there)} weights of experts")
    return report


def checkpoint(folder: Path) -> list[str]:
    """One run in one layout after another, beside one in threads that goes on likewise."""
    report = []
    layouts = [
        ((2, 2), 2, "owners"), ((4,), 1, "sharded"), ((4,), 4, "sharded"), ((2, 2), 1, "owners"),
        ((4,), 2, "owners"), ((1, 3), 1, "owners"),
    ]  # fmt: skip
    for experts, wanted_layouts in ((StackedExperts, layouts), (ListedExperts, layouts[1:4])):
        own = folder / f"own-{experts.__name__}"
        for number, (replicas, size, reducer) in enumerate(wanted_layouts):
            model, first = make_mixture(experts), 2 * number
            plan = plan_for(model, replicas, size).with_reducer(reducer)
            whole = plan.with_expert_ranks(1)
            alone = make_mixture(experts)
            (wanted,) = spread([partial(going_on, whole, alone, own, first, transport="threads")])
            state = going_on(plan, model, folder / experts.__name__, first)
            far = max((state[key] - value).abs().max().item() for key, value in wanted.items())
            if not far <= 1e-12:
                report.append(f"{experts.__name__} {replicas} {size} {reducer}: {far}")
            dist.barrier()
    return report


def held() -> list[str]:
    """A copy has its share of the experts' weights and of what the optimizer keeps of them; tokens
    of all copies have come to them, as many as were sent."""
    make = partial(make_mixture, num_experts=8, idle=(2,))
    report = []
    with pipeline_of_job(plan_for(make(), (4,), 4), make()) as pipeline:
        pipeline.step(*make_batch(24, DOUBLE))
        (stage,) = pipeline.stages.values()
        loads = pipeline.expert_loads()
        share = sum(own.rows.nbytes for own in stage.experts.weights)
        worker = pipeline._parts.workers[0]
        kept = sum(
            value.nbytes
            for state in worker.updater.optimizers[0].state.values()
            for value in state.values()
        )
    experts = sum(2 * own.nbytes for own in make()[1].experts.parameters())
    whole = sum(own.nbytes for own in make().parameters())
    if share != experts / 4:
        report.append(f"{share} bytes of {experts} are here")
    wanted = 2 * (whole - experts * 3 / 4)
    if not wanted <= kept <= wanted + 1000:
        report.append(f"{kept} bytes of optimizer state, wanted {wanted}")
    for name, shares in loads.items():
        if shares[2] or abs(sum(shares) - 1) > 1e-9 or len(shares) != 8:
            report.append(f"{name}: {shares}")
    return report


class Centred(StackedExperts):
    def forward(self, tokens, expert_index, expert_weights):
        return super().forward(tokens - tokens.mean(0), expert_index, expert_weights)


def refusals() -> list[str]:
    """What is said of plans, models and minibatches that do not go with expert ranks."""
    drops = make_mixture()
    drops[1].experts.drop = nn.Dropout(0.5)
    odd = make_mixture(num_experts=3)
    frozen = make_mixture()
    frozen[1].experts.register_buffer("scale", torch.ones(1))
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).double()
    tied = make_mixture()
    tied[4].experts = tied[1].experts
    cases = [
        (make_mixture(Centred), {}, "treats tokens together"),
        (tied, {}, "tied between '1.experts.up' and '4.experts.up'"),
        (make_mixture(), {"compile": "aot_eager"}, "expert ranks, which exchange tokens"),
        (drops, {}, "drops out features"),
        (odd, {}, "which 2 expert ranks cannot divide evenly"),
        (frozen, {}, "has buffers"),
        (plain, {}, "and no experts"),
        (make_mixture(), {"transport": "threads"}, "start the job with torchrun"),
        (make_mixture(), {"optimizer": None}, "without an optimizer"),
        (make_mixture(), {"post_validate": True, "clip_norm": 1.0}, "post_validate"),
    ]
    report: list[str] = []
    for model, options, words in cases:
        report += not_refused(plan_for(model, (4,), 2), model, words, **options)
    batch = make_batch(24, DOUBLE)
    ignored = batch[1].clone()
    ignored[:3] = -100
    counted = {"weight": lambda labels: (labels != -100).sum()}
    asks = [
        (lambda pipeline: pipeline.state_dict(), "gather_state_dict"),
        (lambda pipeline: pipeline.dtensor_state_dict(), "gather_state_dict"),
        (lambda pipeline: pipeline.evaluate(batch[0][:3]), "4 copies that divide its experts"),
        (lambda pipeline: pipeline.step(batch[0][:7], batch[1][:7]), "without rows"),
        (lambda pipeline: pipeline.step(batch[0], ignored), "would count nothing"),
    ]
    for ask, words in asks:
        model = make_mixture()
        report += not_refused(plan_for(model, (4,), 2), model, words, ask, **counted)
    return report


class Wavering(nn.Module):
    """A mixture that even ranks leave out, and odd ones do not."""

    def __init__(self, mixture):
        super().__init__()
        self.mixture = mixture

    def forward(self, x):
        return self.mixture(x) if dist.get_rank() % 2 else x


def other_ways() -> list[str]:
    """Copies that are at different mixtures say so before they learn anything."""
    model = make_mixture()
    model[1] = Wavering(model[1])
    batch, words = make_batch(24, DOUBLE), "are at different mixtures"
    return [*not_refused(plan_for(model, (4,), 2), model, words, lambda own: own.step(*batch))]


def ends(case: str) -> list[object]:
    """What a training ends with in which a rank dies before it joins an exchange of tokens."""
    victim, calls = int(case.partition(" ")[0]), []

    def fail(*_) -> None:
        calls.append(None)
        if len(calls) == 6 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    model = make_mixture()
    model[4].router.register_forward_hook(fail)
    plan = plan_for(model, (2, 2), 2)
    start = time.monotonic()
    try:
        with pipeline_of_job(plan, model) as pipeline:
            for step in range(9):
                pipeline.step(*make_batch(24, DOUBLE, step))
    except PenstockError as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return []


if __name__ == "__main__":
    run_case(
        {
            "own": own,
            "own in every way": partial(own, every=True),
            "transformers": from_transformers,
            "checkpoint": partial(checkpoint, Path(sys.argv[-1])),
            "held": held,
            "split": split,
            "refusals": refusals,
            "other ways": other_ways,
        },
        ends,
    )
