"""Ranks that are given different things, one after the other, each in a Pipeline of its own.

    torchrun ... alike.py TRANSPORT FOLDER

Each rank reports what each case told it, and whether its weights moved: ``report-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import penstock as pk
from penstock.base.errors import PenstockError
from tests.kit.streams import batches, layered_model, plan_for
from tests.numerics.test_asynchronous import POLICIES

DEADLINE_SECONDS = 300
ROWS = (8, 8, 8)


class Case(NamedTuple):
    """What the odd rank does, and what all are told.

    Attributes:
        odd: the rank that is given something else.
        act: uses a pipeline, given whether this rank is the odd one.
        told: what every rank's error says.
        policy: of weight versions.
        replicas: of the stages.
        options: of the pipeline.
    """

    odd: int
    act: Callable[[pk.Pipeline, bool], object]
    told: str
    policy: str = "flush"
    replicas: str | None = None
    options: Mapping[str, object] = MappingProxyType({})


def step(pipeline, odd, **how):
    inputs, targets = batches(ROWS)[0]
    return pipeline.step(inputs, targets.flip(0) if odd else targets, **how)


def step_on_other_inputs(pipeline, odd):
    inputs, targets = batches(ROWS)[0]
    return pipeline.step(inputs.flip(0) if odd else inputs, targets)


def steps(pipeline, odd):
    minibatches = batches(ROWS)
    if odd:
        inputs, targets = minibatches[1]
        minibatches[1] = inputs, targets + 1
    return list(pipeline.steps(minibatches))


def fewer_rows(pipeline, odd):
    return list(pipeline.steps(batches((8, 2, 8) if odd else ROWS)))


def fewer_minibatches(pipeline, odd):
    return list(pipeline.steps(batches(ROWS)[: 2 if odd else 3]))


def fewer_to_judge(pipeline, odd):
    return pipeline.evaluate_loss(batches(ROWS)[: 1 if odd else 2])


def evaluate(pipeline, odd):
    inputs, targets = batches(ROWS)[0]
    return pipeline.evaluate(inputs) if odd else pipeline.step(inputs, targets)


def evaluate_others(pipeline, odd):
    return pipeline.evaluate(batches(ROWS)[odd][0])


def accumulate(pipeline, odd):
    return step(pipeline, False, update=not odd)


def share(pipeline, odd):
    return step(pipeline, False, share=0.5 if odd else 1.0)


def autocast(pipeline, odd):
    with torch.autocast("cpu", torch.bfloat16, enabled=odd):
        return step(pipeline, False)


def evaluate_under_autocast(pipeline, odd):
    with torch.autocast("cpu", torch.float16 if odd else torch.bfloat16):
        return pipeline.evaluate(batches(ROWS)[0][0])


def evaluation_mode(pipeline, odd):
    for stage in pipeline.stages.values():
        for layer in stage.layers:
            layer.module.train(not odd)
    return step(pipeline, False)


def step_beside_a_loop(pipeline, odd):
    if not odd:
        return list(pipeline.steps(batches(ROWS)))
    return [pipeline.step(*batch) for batch in batches(ROWS)]


def gather(pipeline, odd):
    return pipeline.gather_state_dict() if odd else step(pipeline, False)


def gather_beside_one_that_evaluates(pipeline, odd):
    return pipeline.evaluate(batches(ROWS)[0][0]) if odd else pipeline.gather_state_dict()


def gather_one_too_often(pipeline, odd):
    for _ in range(2):
        step(pipeline, False)
        pipeline.gather_state_dict()
    return gather(pipeline, odd)


SILENT = {"results": "none", "record": False}
DATA = r"train on different data: their {} differ\. .*DistributedSampler.*compare_data=False"
TARGETS, INPUTS = DATA.format("targets"), DATA.format("inputs")
GATHERS = r"rank {}( calls)? gather_state_dict\(\)"
CASES = {
    "targets": Case(2, step, TARGETS),
    "targets of the first rank": Case(0, step, TARGETS),
    "targets, quietly": Case(2, step, TARGETS, options=SILENT),
    "inputs": Case(1, step_on_other_inputs, INPUTS, options=SILENT),
    "in a loop": Case(2, steps, TARGETS, options=SILENT),
    "in a stream": Case(2, steps, TARGETS, "stash", options=SILENT),
    "in a stream of rounds": Case(1, steps, TARGETS, "2bw"),
    "in a stream with replicas": Case(1, steps, TARGETS, "stash", "2-1"),
    "copies of all layers": Case(1, step, TARGETS, "flush", "3", options=SILENT),
    "copies of a stage": Case(1, step_on_other_inputs, INPUTS, "flush", "2-1", options=SILENT),
    "fewer rows": Case(0, fewer_rows, "rank 0 has 2 microbatches|has 4 microbatches, but rank 0"),
    "fewer rows in a stream": Case(2, fewer_rows, "2 microbatches", "stash"),
    "fewer minibatches": Case(1, fewer_minibatches, "rank 1 ends its loop with this minibatch"),
    "fewer to judge": Case(0, fewer_to_judge, "rank 0 ends its evaluation with this minibatch"),
    "evaluates": Case(0, evaluate, r"rank 0( calls)? evaluate\(\)"),
    "is evaluated": Case(2, evaluate, r"rank 2( calls)? evaluate\(\)", options=SILENT),
    "evaluates others": Case(2, evaluate_others, INPUTS),
    "accumulates": Case(1, accumulate, r"rank 1( calls)? step\(update=False\)"),
    "autocast": Case(0, autocast, "autocast of cpu is .*bfloat16 on rank 0", options=SILENT),
    "autocast in a stream": Case(2, autocast, "autocast of cpu is .*bfloat16 on rank 2", "stash"),
    "autocast, evaluating": Case(
        1, evaluate_under_autocast, "autocast of cpu is .*float16 on rank 1"
    ),
    "evaluation mode": Case(1, evaluation_mode, "the layers are .*evaluation mode on rank 1"),
    "a step beside a loop": Case(
        1, step_beside_a_loop, r"rank 1 calls step\(\), but rank [02] is in a loop over steps\(\)"
    ),
    "gathers": Case(0, gather, GATHERS.format(0)),
    "gathers, quietly": Case(1, gather, GATHERS.format(1), options=SILENT),
    "gathers, at the end": Case(2, gather, GATHERS.format(2), options=SILENT),
    "gathers in a stream": Case(1, gather, GATHERS.format(1), "2bw", options=SILENT),
    "gathers later": Case(1, gather_one_too_often, GATHERS.format(1), "stash"),
    "others gather": Case(0, gather_beside_one_that_evaluates, r"rank 0( calls)? evaluate\(\)"),
    "share": Case(2, share, "share is .*0.5 on rank 2"),
}


@lru_cache
def plan_of(policy: str, replicas: str | None) -> pk.Plan:
    stages = None if replicas else dist.get_world_size()
    return plan_for(POLICIES[policy], stages, microbatches=4, replicas=replicas)


def pipeline_of(case: Case, model: nn.Module, transport: str) -> pk.Pipeline:
    plan = plan_of(case.policy, case.replicas)
    return pk.Pipeline(
        model,
        plan,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        transport=transport,
        seed=3,
        deadline_seconds=DEADLINE_SECONDS,
        **case.options,
    )


def outcome_of(case: Case, transport: str) -> dict:
    """What a case told this rank, and how many minibatches' updates its weights have."""
    model = layered_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    told = ""
    with pipeline_of(case, model, transport) as pipeline:
        try:
            case.act(pipeline, dist.get_rank() == case.odd)
        except PenstockError as error:
            told = str(error)
        # Whoever was not told by then is told by the next call.
        if not told:
            try:
                step(pipeline, False)
            except PenstockError as error:
                told = str(error)
    after = model.parameters()
    moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {"told": told, "moved": moved}


def different_on_purpose(transport: str) -> list[str]:
    """Without comparing, ranks need only what they use."""
    found = []
    case = Case(0, step, "", options={"compare_data": False})
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    losses = []
    for everything in (True, False):
        with pipeline_of(case, layered_model(), transport) as pipeline:
            for inputs, targets in batches(ROWS):
                own = everything or rank == 0, everything or rank == last
                given = [
                    v if has else torch.zeros_like(v)
                    for v, has in zip((inputs, targets), own, strict=True)
                ]
                losses.append(pipeline.step(*given))
    if losses[: len(ROWS)] != losses[len(ROWS) :]:
        found.append(f"losses {losses}")
    return found


def main(transport: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = {name: outcome_of(case, transport) for name, case in CASES.items()}
    report["differences"] = different_on_purpose(transport)
    Path(folder, f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
