"""Every rank trains a pipeline in many ways and, beside it, the whole model in plain torch; then it
reports what differs."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from penstock.base.errors import ModelError, RunError
from penstock.demo import gpt
from penstock.trial.reference.single_device import SingleDevice
from tests.kit import training
from tests.kit.helpers import make_batch, make_mlp, same_order_families
from tests.kit.one_device import OneDevice, same
from tests.kit.tiny_models import conv_batch, gpt_batch, make_conv_net, make_gpt
from tests.kit.training import adamw
from tests.numerics.test_one_logical_model_shared import (
    TiedGPT,
    UNet,
    picture_batch,
    token_batch,
)

Found = Iterator[str]
SKIP_CASES = [("1f1b", "layers"), ("zb-v", "stage"), ("interleaved-1f1b", "none")]


def pipeline_of(transport, model, schedule, num_microbatches=4, **options):
    num_ranks, options = dist.get_world_size(), {"optimizer": adamw, **options}
    return training.pipeline_of(
        model, schedule, num_ranks, num_microbatches, transport=transport, **options
    )


def weights_differ(pipeline, model, tolerance=0.0) -> Found:
    state = model.state_dict()
    for key, value in pipeline.state_dict().items():
        if not same(value, state[key], tolerance):
            yield key


class Case(NamedTuple):
    """A model and what it is trained on."""

    build: Callable
    loss: Callable
    batches: list


def cases(count: int, chimera: bool) -> Iterator[tuple[Case, torch.Tensor, torch.nn.Module]]:
    """With the losses and the model of one device."""
    dtype = torch.float64 if chimera else torch.float32
    conv_net = partial(make_conv_net, dtype, statistics=not chimera)
    for build, loss, batch in (
        (partial(make_gpt, dtype), gpt.loss, gpt_batch),
        (conv_net, F.cross_entropy, partial(conv_batch, dtype=dtype)),
    ):
        case = Case(build, loss, [batch(count, seed) for seed in range(3)])
        model = case.build()
        reference = SingleDevice(model, count, loss, adamw)
        yield case, torch.stack([reference.step(*one) for one in case.batches]), model


def every_family(transport: str) -> Found:
    """A GPT and a convolutional net; two of three steps overlap."""
    count = 2 * dist.get_world_size()
    for schedules, chimera in ((same_order_families(), False), (["chimera"], True)):
        for case, expected, theirs in cases(count, chimera):
            tolerance = 1e-12 if chimera else 0.0
            for schedule in schedules:
                ours = case.build()
                with pipeline_of(
                    transport, ours, schedule, count, loss=case.loss, record=False
                ) as pipeline:
                    losses = [pipeline.step(*case.batches[0]), *pipeline.steps(case.batches[1:])]
                    if not same(torch.stack(losses), expected, tolerance):
                        yield f"{schedule}: losses"
                    for key in weights_differ(pipeline, theirs, tolerance):
                        yield f"{schedule}: {key}"


def deep_mlp():
    return torch.nn.Sequential(*make_mlp(0.0), *(torch.nn.Linear(4, 4) for _ in range(3)))


def clipping_and_scaling(transport: str) -> Found:
    """Post-validated and not, with overlap; some gradients are infinite."""
    batches = [make_batch(13, seed=step) for step in range(7)]
    batches[1][0][5] = batches[4][0][5] = 1e36
    for schedule in ("1f1b", "zb-h1", "zb-v"):
        for post_validate in (False, True):
            scalers = [torch.amp.GradScaler("cpu", growth_interval=2) for _ in range(2)]
            ours = deep_mlp()
            theirs = copy.deepcopy(ours)
            reference = OneDevice(
                theirs, 4, optimizer=adamw, clip_norm=0.05, grad_scaler=scalers[1]
            )
            with pipeline_of(
                transport,
                ours,
                schedule,
                clip_norm=0.05,
                grad_scaler=scalers[0],
                post_validate=post_validate,
            ) as pipeline:
                losses = [pipeline.step(*one) for one in batches[:3]]
                losses += pipeline.steps(batches[3:])
                expected = [reference.step(*one) for one in batches]
                name = f"{schedule}, post_validate={post_validate}"
                if not same(torch.stack(losses), torch.stack(expected)):
                    yield f"{name}: losses"
                if not same(pipeline.grad_norm, reference.norm):
                    yield f"{name}: norm"
                if scalers[0].state_dict() != scalers[1].state_dict():
                    yield f"{name}: scale"
                for key in weights_differ(pipeline, theirs):
                    yield f"{name}: {key}"


def tied_weights(transport: str) -> Found:
    """With clipping, accumulation, and a checkpoint that comes back."""
    for schedule in ("1f1b", "zb-h1", "zb-v", "chimera"):
        ours = TiedGPT()
        theirs = copy.deepcopy(ours)
        reference = OneDevice(theirs, 4, gpt.loss, adamw, clip_norm=0.3)
        with pipeline_of(transport, ours, schedule, loss=gpt.loss, clip_norm=0.3) as pipeline:
            for step in range(5):
                how = {"update": step != 3, "share": 0.5}
                batch = token_batch(3 if step == 2 else 9, seed=step)
                if not same(pipeline.step(*batch, **how), reference.step(*batch, **how), 1e-12):
                    yield f"{schedule} step {step}: loss"
                if step == 0:
                    half = {key: value * 0.5 for key, value in theirs.state_dict().items()}
                    ours.load_state_dict(half)
                    theirs.load_state_dict(half)
            outputs = pipeline.evaluate(token_batch()[0])
            if not same(outputs, theirs(token_batch()[0]).detach(), 1e-10):
                yield f"{schedule}: outputs"
            for key in weights_differ(pipeline, theirs, 1e-11):
                yield f"{schedule}: {key}"


def skips(transport: str) -> Found:
    """Across stages, with dropout, recomputation and changing shapes."""
    for schedule, recompute in SKIP_CASES:
        ours, theirs = UNet(dropout=0.3), UNet(dropout=0.3)
        reference = SingleDevice(theirs, 4, F.mse_loss, adamw, seed=3)
        with pipeline_of(
            transport, ours, schedule, recompute=recompute, loss=F.mse_loss
        ) as pipeline:
            for step, (rows, size) in enumerate([(9, 8), (3, 8), (8, 16)]):
                batch = picture_batch(rows, step, size)
                if not torch.equal(pipeline.step(*batch), reference.step(*batch)):
                    yield f"{schedule} step {step}: loss"
            inputs = picture_batch(7)[0]
            if not same(pipeline.evaluate(inputs), theirs.eval()(inputs).detach(), 1e-12):
                yield f"{schedule}: outputs"
            for key in weights_differ(pipeline, theirs):
                yield f"{schedule}: {key}"


def hooks(transport: str) -> Found:
    """On parameters with copies; on tied ones, where every rank refuses them."""
    ours = make_mlp(0.0, torch.float64)
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3) + 1e-3)
    reference = OneDevice(theirs, 4, optimizer=adamw)
    with pipeline_of(transport, ours, "chimera") as pipeline:
        for step, rows in enumerate((13, 3, 13)):
            batch = make_batch(rows, torch.float64, seed=step)
            if not same(pipeline.step(*batch), reference.step(*batch), 1e-12):
                yield f"step {step}: loss"
        yield from weights_differ(pipeline, theirs, 1e-11)
    tied = TiedGPT()
    with pipeline_of(transport, tied, "1f1b", loss=gpt.loss) as pipeline:
        tied.embedding.tokens.weight.register_hook(lambda gradient: gradient)
        try:
            pipeline.step(*token_batch())
            yield "no error"
        except ModelError as error:
            if "'embedding.tokens.weight' has hooks" not in str(error):
                yield str(error)


def results(transport: str) -> Found:
    """On every rank, or nothing at all; a loop that is left early."""
    batches = [make_batch(13, seed=step) for step in range(4)]
    for told in ("every rank", "none"):
        ours, theirs = make_mlp(0.0), make_mlp(0.0)
        reference = OneDevice(theirs, 4, optimizer=adamw)
        expected = [reference.step(*batch) for batch in batches]
        metrics = {"rows": lambda _, targets: len(targets)}
        with pipeline_of(
            transport, ours, "1f1b", results=told, record=False, metrics=metrics
        ) as pipeline:
            losses = []
            for loss in pipeline.steps(batches):
                losses.append(loss)
                if len(losses) == 2:
                    break
            losses += [None, pipeline.step(*batches[3])]
            outputs = pipeline.evaluate(batches[0][0])
            wanted = [*expected[:2], None, expected[3]] if told == "every rank" else [None] * 4
            if any(a is not b and not same(a, b) for a, b in zip(losses, wanted, strict=True)):
                yield f"{told}: losses {losses}"
            if (outputs is None) != (told == "none") or bool(pipeline.metrics) == (told == "none"):
                yield f"{told}: outputs or metrics"
            for key in weights_differ(pipeline, theirs):
                yield f"{told}: {key}"


def losses_that_are_not_finite(transport: str) -> Found:
    """Every rank hears of it, before any weight has changed."""
    ours = make_mlp(0.0)
    before = copy.deepcopy(ours)
    inputs, targets = make_batch(13)
    inputs[7] = torch.nan
    pipeline = pipeline_of(transport, ours, "1f1b")
    try:
        pipeline.step(inputs, targets)
        yield "no error"
    except RunError as error:
        last = dist.get_world_size() - 1
        if f"stage {last}, microbatch 2, op {last}F2: ArithmeticError: the loss is nan" not in str(
            error
        ):
            yield str(error)
    yield from weights_differ(pipeline, before)


# The last one leaves the pipeline's transport behind in an error.
PARTS: list[Callable[[str], Found]] = [
    clipping_and_scaling, tied_weights, skips, hooks, results, losses_that_are_not_finite
]  # fmt: skip


def main() -> None:
    what, transport, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parts = [every_family] if what == "families" else PARTS
    found = [f"{part.__name__}: {difference}" for part in parts for difference in part(transport)]
    report = folder / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps({"differences": found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
