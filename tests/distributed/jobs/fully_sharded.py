"""Ranks that have rows of their stages' weights, beside one device and beside copies that keep all.

    torchrun ... fully_sharded.py CASE FOLDER

Cases: ``one device`` compares in float64 with plain torch, over schedules and options, ``one device
in every way`` with weights gathered for either time; ``owners`` with copies that keep all weights;
``checkpoint`` goes on from one layout in another; ``refusals`` asks for what cannot be; ``held``
weighs what ranks keep; ``split`` has backwards in two halves; ``other ways`` lets copies go back
through different layers; in ``VICTIM dies`` or ``VICTIM raises`` a rank ends, or one of its layers;
``anew`` builds the next pipeline behind a failure. Each rank reports in ``report-<rank>.json``.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import warnings
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

from penstock.base.errors import PenstockError
from penstock.engine.stage.stage import Stage
from penstock.planning.plans import Plan
from penstock.training.pipeline import Pipeline
from tests.kit.cases import run_case
from tests.kit.copies_in_job import (
    DOUBLE,
    AllRanks,
    backward_in_halves,
    far_from_one_device,
    going_on,
    not_refused,
)
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.launch import stall
from tests.kit.reducing import replicated
from tests.kit.sharing import spread
from tests.kit.training import pipeline_of_job

STEPS = 3
EVERY = ("step", "use")


def plan_for(name: str, model: nn.Module, recompute="none") -> Plan:
    if name == "chimera":
        return make_plan(model, 4, 8, "chimera", recompute=recompute)
    schedule, replicas = name.split()
    plan = replicated(model, tuple(map(int, replicas.split("-"))), 12)
    stages = [replace(stage, recompute=recompute) for stage in plan.stages]
    return replace(plan, schedule=schedule, stages=tuple(stages))


def sharded_for(name: str, model: nn.Module, kept: str, recompute="none") -> Plan:
    """With hybrids, ranks 0 and 1 have all weights together, and 2 and 3 do."""
    kept, *hybrid = kept.split(", ")
    plan = plan_for(name, model, recompute).with_reducer("fully-sharded", gathered_for=kept)
    levels = ((0, 0, 1, 1),) if hybrid else ()
    return plan.edited(summing=replace(plan.summing, levels=levels))


def one_device(*, every: bool = False) -> list[str]:
    """Unless every way is asked for, cases take turns in how long weights stay gathered, but for
    copies of all stages."""
    cases = [
        ("gpipe 2-2", "none", {}),
        ("1f1b 2-2", "none", {"clip_norm": 0.1}),
        ("1f1b 3-1", "layers", {}),
        ("1f1b 1-3", "stage", {}),
        ("1f1b 4", "none", {"grad_scaler": partial(torch.amp.GradScaler, "cpu", init_scale=64.0)}),
        ("chimera", "none", {}),
    ]
    found = []
    hybrids = [(case, f"{kept}, hybrid") for case, kept in product(cases[4:5], EVERY)]
    ways = [
        (case, kept)
        for turn, case in enumerate(cases)
        for kept in (EVERY if every or case is cases[4] else EVERY[turn % 2 :][:1])
    ]
    for (name, recompute, options), kept in [*ways, *hybrids]:
        make = partial(make_mlp, dropout=0.0, dtype=DOUBLE)
        plan = sharded_for(name, make(), kept, recompute)
        far = far_from_one_device(plan, make, STEPS, options, num_evaluated=7)
        if not far <= 1e-12:
            found.append(f"{name} {recompute} {kept}: {far}")
    return found


def trained(plan: Plan, batches, *, in_loop=False, **options) -> dict[str, torch.Tensor]:
    """The weights after some minibatches."""
    with pipeline_of_job(plan, make_mlp(dropout=0.1), **options) as pipeline:
        if in_loop:
            for _ in pipeline.steps(batches):
                pass
        else:
            for batch in batches:
                pipeline.step(*batch)
        return pipeline.gather_state_dict()


def owners() -> list[str]:
    """Sums are made in the same order, so bits are those of copies that keep all weights; also
    where copies have different numbers of microbatches."""
    found = []
    for name, in_loop, rows in (
        ("1f1b 2-2", False, 24),
        ("gpipe 1-3", True, 24),
        ("1f1b 3-1", True, 7),
    ):
        plan = plan_for(name, make_mlp())
        batches = [make_batch(rows, seed=step) for step in range(STEPS)]
        expected = trained(plan, batches, in_loop=in_loop, transport="threads")
        for kept in EVERY:
            sharded = plan.with_reducer("fully-sharded", gathered_for=kept)
            got = trained(sharded, batches, in_loop=in_loop)
            found += [
                f"{name} {kept}: {key}"
                for key, value in got.items()
                if not torch.equal(value, expected[key])
            ]
    return found


def counted() -> list[str]:
    """Activations are counted as of copies that keep all weights: gathered ones are none."""
    peaks = []
    for reducer in ("owners", "fully-sharded"):
        plan = plan_for("1f1b 2-2", make_mlp()).with_reducer(reducer)
        with pipeline_of_job(plan, make_mlp(), count_memory=True) as pipeline:
            for step in range(2):
                pipeline.step(*make_batch(24, seed=step))
            peaks.append([list(peak) for peak in pipeline.peaks])
    return [] if peaks[0] == peaks[1] else [f"{peaks}"]


def checkpoint(folder: Path) -> list[str]:
    """One run in one layout after another, beside one in threads that goes on likewise."""
    own, found = folder / "own", []
    layouts = [
        ("1f1b 2-2", "fully-sharded", "use"),
        ("1f1b 1-3", "fully-sharded", "step"),
        ("gpipe 4", "sharded", "step"),
        ("1f1b 4", "fully-sharded", "use"),
        ("1f1b 4", "fully-sharded", "use, hybrid"),
        ("gpipe 3-1", "owners", "step"),
    ]
    for number, (name, reducer, kept) in enumerate(layouts):
        make, first = partial(make_mlp, dropout=0.1), 2 * number
        plan = plan_for(name, make_mlp())
        if "hybrid" in kept:  # threads add in the same order
            plan = plan.edited(summing=replace(plan.summing, levels=((0, 0, 1, 1),)))
        options = {"dtype": torch.float32, "transport": "threads"}
        (expected,) = spread([partial(going_on, plan, make(), own, first, **options)])
        sharded = plan.with_reducer(reducer)
        if reducer == "fully-sharded":
            sharded = sharded_for(name, make_mlp(), kept)
        got = going_on(sharded, make(), folder / "run", first, torch.float32)
        found += [f"{name}: {k}" for k, v in got.items() if not torch.equal(v, expected[k])]
        dist.barrier()
    return found


def bytes_held() -> int:
    """Of all tensors with values that this process knows, each piece of memory once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [own for own in gc.get_objects() if type(own) in (torch.Tensor, nn.Parameter)]
    storages = {own.untyped_storage().data_ptr(): own.untyped_storage().nbytes() for own in tensors}
    return sum(storages.values())


def held() -> list[str]:
    """Between steps a rank has its share of weights and state; within, all weights of its stage or
    one layer.s twice while it is gathered, and whole gradients."""
    return [wrong for kept in EVERY for wrong in _held(kept)]


def _held(kept: str) -> list[str]:
    width, depth, copies = 96, 6, dist.get_world_size()
    layer = 8 * (width * width + width)
    whole, slack = depth * layer, 0.1
    before = bytes_held()
    model = nn.Sequential(*(nn.Linear(width, width, dtype=DOUBLE) for _ in range(depth)))
    seen: list[int] = []
    plan = replicated(model, (copies,), copies).with_reducer("fully-sharded", gathered_for=kept)
    model[3].register_forward_hook(lambda *_: seen.append(bytes_held()))
    batch = torch.ones(copies, width, dtype=DOUBLE), torch.ones(copies, width, dtype=DOUBLE)
    with pipeline_of_job(plan, model, loss=F.mse_loss) as pipeline:
        built = bytes_held()
        for _ in range(2):
            pipeline.step(*batch)
        stepped = bytes_held()
    share = 1 / copies
    # While a layer computes, others may be on their way: what was received is copied then.
    on_its_way = defaultdict(
        float, dict.fromkeys(("at the first forward", "at the second"), 2 / depth)
    )
    wanted = {
        "built": (built, share),
        "at the first forward": (seen[0], share + (1 if kept == "step" else 2 / depth)),
        "at the second": (seen[1], 3 * share + (1 if kept == "step" else 2 / depth)),
        "after both": (stepped, 3 * share),
    }
    return [
        f"{kept} {when}: {(there - before) / whole:.3f} of the weights, wanted {right:.3f}"
        for when, (there, right) in wanted.items()
        if not right - slack / 2 <= (there - before) / whole <= right + slack + on_its_way[when]
    ]


def split() -> list[str]:
    """Backwards in two halves, with several microbatches under way, on a stage alone."""
    found = []
    for frees_with in (2, None):
        model, alone = (make_mlp(dropout=0.0, dtype=DOUBLE) for _ in range(2))
        if dist.get_rank():
            nn.init.zeros_(model[0].weight)  # the first copy's values count

        def divide(stage: Stage, frees_with=frees_with) -> None:
            stage.shard(AllRanks(), frees_with=frees_with)
            stage.sharded.begin(2)

        stage = backward_in_halves(model, alone, divide, lambda stage: stage.sharded.sum())
        for own, theirs in zip(stage.sharded.parameters, alone.parameters(), strict=True):
            rows = theirs.grad[own.start : own.start + len(own.rows)]
            if not torch.allclose(own.rows.grad, rows, rtol=0, atol=1e-12):
                found.append(f"{frees_with}: rows from {own.start}")
        norms = torch.stack(stage.sharded.norms())
        wanted = torch.stack([theirs.grad.norm() for theirs in alone.parameters()])
        found += [] if torch.allclose(norms, wanted, rtol=1e-12) else [f"{norms} {wanted}"]
    return found


def refusals() -> list[str]:
    """What a pipeline says of models and options that it cannot shard."""
    twice = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    twice[2].weight = twice[0].weight
    scalar = make_mlp()
    scalar[3].factor = nn.Parameter(torch.tensor(1.0))
    mixed = make_mlp()
    mixed[3].bias = nn.Parameter(mixed[3].bias.double())
    sparse = nn.Sequential(nn.Embedding(10, 16, sparse=True), nn.Linear(16, 4))
    cases = [
        (twice, (4,), {}, "is tied to layer '0'"),
        (twice, (2, 2), {}, "is tied between stages"),
        (scalar, (4,), {}, "a single number without rows"),
        (mixed, (4,), {}, "has parameters of torch.float32 and torch.float64"),
        (sparse, (4,), {}, "sparse gradients"),
        (make_mlp(), (4,), {"optimizer": None}, "without an optimizer"),
        (make_mlp(), (4,), {"optimizer": torch.optim.Adafactor}, "may need whole parameters"),
        (make_mlp(), (4,), {"transport": "threads"}, "start the job with torchrun"),
        (make_mlp(), (4,), {"count_memory": True}, "take gathered_for='step'"),
    ]
    found = []
    for model, replicas, options, words in cases:
        kept = "use" if "count_memory" in options else "step"
        plan = replicated(model, replicas, 4).with_reducer("fully-sharded", gathered_for=kept)
        found += not_refused(plan, model, words, **options)
    for ask in (Pipeline.state_dict, Pipeline.dtensor_state_dict):
        model = make_mlp()
        plan = replicated(model, (4,), 4).with_reducer("fully-sharded")
        found += not_refused(plan, model, "gather_state_dict", ask)
    return found


class Wavering(nn.Linear):
    """A layer through which nothing goes back, on even ranks every second time, on odd ones every
    other."""

    calls = 0

    def forward(self, value):
        self.calls += 1
        return super().forward(value if (self.calls + dist.get_rank()) % 2 else value.detach())


def other_ways() -> list[str]:
    """Copies that go back through different layers say so before they learn anything; where all is
    gathered before, none minds."""
    found, batch, words = [], make_batch(24), "have run different layers"
    for kept in EVERY:
        model = nn.Sequential(
            *(kind(16, 16) for kind in (nn.Linear, nn.Linear, Wavering, nn.Linear))
        )
        plan = replicated(model, (4,), 8).with_reducer("fully-sharded", gathered_for=kept)
        said = [*not_refused(plan, model, words, lambda own: own.step(*batch))]
        if said != ([] if kept == "use" else [f"nobody says: {words}"]):
            found.append(f"{kept}: {said}")
    return found


def anew() -> list[str]:
    """Ranks drop what has failed, and go on to the next pipeline, while the one that has made it
    fail keeps its own until it has built the next: nobody waits for it."""
    found = []
    for kept in EVERY:
        model = make_mlp()
        plan = replicated(model, (4,), 8).with_reducer("fully-sharded", gathered_for=kept)
        pipeline = pipeline_of_job(plan, model, startup_seconds=60)
        if dist.get_rank() == 1:
            model[2].register_forward_hook(_raise)
        try:
            pipeline.step(*make_batch(24))
            found.append(f"{kept}: nobody has failed")
        except PenstockError:
            pass
        if dist.get_rank() != 1:
            del pipeline, model
            gc.collect()
        with pipeline_of_job(plan, make_mlp(), startup_seconds=15) as following:
            following.step(*make_batch(24))
    return found


def _raise(*_) -> None:
    raise ValueError("a layer that raises")


def ends(case: str) -> list[str]:
    """What a training ends with in which one rank dies in a layer, or raises there and lives on,
    with its pipeline, until the others have given up."""
    (victim, how, replicas), calls = case.split(), []

    def fail(*_) -> None:
        calls.append(None)
        if len(calls) == 8 and dist.get_rank() == int(victim):
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a layer that raises")

    plan = plan_for(f"1f1b {replicas}", make_mlp()).with_reducer(
        "fully-sharded", gathered_for="use"
    )
    model = make_mlp(dropout=0.1)
    model[2].register_forward_hook(fail)
    start = time.monotonic()
    with pipeline_of_job(plan, model) as pipeline:
        try:
            for seed in range(9):
                pipeline.step(*make_batch(24, seed=seed))
        except PenstockError as error:
            report = [type(error).__name__, str(error), time.monotonic() - start]
            if dist.get_rank() == int(victim):
                stall(Path(sys.argv[-1]), {*range(4)} - {int(victim)}, 60)
            return report
    return []


if __name__ == "__main__":
    run_case(
        {
            "one device": one_device,
            "one device in every way": partial(one_device, every=True),
            "anew": anew,
            "owners": owners,
            "checkpoint": partial(checkpoint, Path(sys.argv[-1])),
            "held": held,
            "counted": counted,
            "other ways": other_ways,
            "refusals": refusals,
            "split": split,
        },
        ends,
    )
