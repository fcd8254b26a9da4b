"""Train a case through a pipeline and by an oracle, and tell the first difference."""

from __future__ import annotations

import itertools
import warnings

import torch
import torch.nn.functional as F

import penstock as pk
from penstock.core.schedule import families
from penstock.engine.model.spine import spine_fingerprint, spine_of
from penstock.planning.plans import StagePlan
from tests.kit.helpers import make_plan
from tests.oracles import nets, plain_replay
from tests.oracles.plain_loop import PlainLoop
from tests.oracles.plain_replay import PlainReplay

SEED = 7
DEADLINE_SECONDS = 300.0
ROUNDING = 1e-9

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
POLICIES = {
    "stash": (pk.versions.Stash(), plain_replay.stash),
    "stash per minibatch": (pk.versions.Stash(updates="minibatch"), plain_replay.stash),
    "vertical sync": (pk.versions.VerticalSync(), plain_replay.vertical_sync),
    "2bw": (pk.versions.DoubleBuffer(), plain_replay.double_buffer),
    "latest": (pk.versions.Latest(), plain_replay.stash),
    "latest per minibatch": (pk.versions.Latest(updates="minibatch"), plain_replay.stash),
}


def decaying(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def compare(case, **running):
    """Train a synchronous case both ways; raises AssertionError at the first difference."""
    dtype = torch.float64 if case.double else torch.float32
    ours, theirs = (nets.make(case.names, case.tokens, dtype) for _ in range(2))
    data = [nets.batch(rows, case.tokens, dtype, k) for k, rows in enumerate(case.rows)]
    losses = _through_pipeline(case, ours, data, running)
    expected = _on_one_device(case, theirs, data)
    tolerance = 0.0 if case.exact else ROUNDING
    _check_losses(losses, expected, tolerance)
    _check_states(ours, theirs, tolerance)


def _through_pipeline(case, net, data, running):
    plan = make_plan(
        net,
        case.num_ranks,
        case.num_microbatches,
        case.schedule,
        list(case.cuts) or None,
        case.recompute,
    )
    pipeline = pk.Pipeline(
        net,
        plan,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[case.optimizer],
        lr_scheduler=decaying if case.scheduler else None,
        clip_norm=case.clip_norm,
        grad_scaler=_scaler() if case.scaler else None,
        post_validate=case.post_validate,
        seed=SEED,
        deadline_seconds=DEADLINE_SECONDS,
        **running,
    )
    with pipeline, torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        if case.streams:
            return list(pipeline.steps(data))
        return [pipeline.step(*batch, **how) for batch, how in _calls(case, data)]


def _on_one_device(case, net, data):
    oracle = PlainLoop(
        net,
        case.num_microbatches,
        F.cross_entropy,
        OPTIMIZERS[case.optimizer],
        scheduler=decaying if case.scheduler else None,
        seed=SEED,
        clip_norm=case.clip_norm,
        scaler=_scaler() if case.scaler else None,
        autocast=torch.bfloat16 if case.autocast else None,
    )
    return [oracle.step(*batch, **how) for batch, how in _calls(case, data)]


def _calls(case, data):
    """Each minibatch, and how ``step`` is called for it."""
    for number, batch in enumerate(data):
        if not case.accumulates:
            yield batch, {}
        else:
            last = number % 2 == 1 or number == len(data) - 1
            yield batch, {"update": last, "share": 0.5}


def _scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**8)


def compare_late(case, **running):
    """Train an asynchronous case both ways; raises AssertionError at the first difference."""
    ours, theirs = (nets.make(case.names, case.tokens, torch.float64) for _ in range(2))
    sizes = [case.num_microbatches * (1 + k % 2) + k % 2 for k in range(case.num_minibatches)]
    data = [nets.batch(rows, case.tokens, torch.float64, k) for k, rows in enumerate(sizes)]
    policy, version = POLICIES[case.policy]
    plan = _late_plan(ours, policy, case)
    with pk.Pipeline(
        ours,
        plan,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[case.optimizer],
        seed=SEED,
        deadline_seconds=DEADLINE_SECONDS,
        **running,
    ) as pipeline:
        losses = list(pipeline.steps(data))
    oracle = PlainReplay(
        theirs,
        [0, *case.cuts, len(theirs.layers)],
        version,
        stashes=not case.policy.startswith("latest"),
        num_microbatches=case.num_microbatches,
        updates=policy.updates,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[case.optimizer],
        seed=SEED,
    )
    _check_losses(losses, oracle.train(data), 1e-12)
    _check_states(ours, theirs, 0.0)


def _late_plan(net, policy, case):
    layers = spine_of(net)
    names = [layer.name for layer in layers]
    borders = [0, *case.cuts, len(layers)]
    schedule = "pipedream-2bw" if case.policy == "2bw" else "pipedream"
    assert schedule in families.names()
    stages = tuple(
        StagePlan(layers=tuple(names[first:last]), rank=rank)
        for rank, (first, last) in enumerate(itertools.pairwise(borders))
    )
    return pk.Plan(
        model=spine_fingerprint(layers),
        schedule=schedule,
        num_microbatches=case.num_microbatches,
        stages=stages,
        versions=policy,
    )


def _check_losses(ours, theirs, tolerance):
    assert len(ours) == len(theirs)
    for step, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
        assert _close(mine, wanted, tolerance), f"loss of step {step}: {mine} instead of {wanted}"


def _check_states(ours, theirs, tolerance):
    mine, wanted = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(wanted)
    for name, value in wanted.items():
        distance = (mine[name].double() - value.double()).abs().max()
        assert _close(mine[name], value, tolerance), f"{name} differs by up to {distance:.3g}"


def _close(mine, wanted, tolerance):
    if tolerance:
        return torch.allclose(mine.to(wanted), wanted, tolerance, tolerance, equal_nan=True)
    return torch.equal(mine, wanted) or bool(mine.isnan().all() and wanted.isnan().all())


def quietly(compare_case, case, **running):
    """Compare, where warnings of torch about what a case does on purpose do not count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare_case(case, **running)
