"""Ranks that have rows of their stages' weights, beside one device and beside copies that keep all.

    torchrun ... fully_sharded.py CASE FOLDER

Cases: ``one device`` compares in float64 with plain torch, over schedules and options; ``owners``
with copies that keep all weights; ``checkpoint`` goes on from one layout in another; ``refusals``
asks for what cannot be; ``held`` weighs what ranks keep; ``killed VICTIM HOW`` loses a rank, and
``raises VICTIM`` a layer's value. Each rank reports in ``report-<rank>.json``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import warnings
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.base.errors import PenstockError
from penstock.planning.plans import Plan
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.one_device import OneDevice
from tests.kit.reducing import replicated
from tests.kit.training import adamw

STEPS = 4
DOUBLE = torch.float64
EVERY = ("step", "use")


def plan_for(name: str, model: nn.Module, recompute="none") -> Plan:
    if name == "chimera":
        return make_plan(model, 4, 8, "chimera", recompute=recompute)
    schedule, replicas = name.split()
    plan = replicated(model, tuple(map(int, replicas.split("-"))), 12)
    stages = [replace(stage, recompute=recompute) for stage in plan.stages]
    return replace(plan, schedule=schedule, stages=tuple(stages))


def pipeline_of(plan: Plan, model: nn.Module, **options) -> pk.Pipeline:
    return pk.Pipeline(
        model, plan, **{
            "loss": F.cross_entropy, "optimizer": adamw, "seed": 1,
            "deadline_seconds": 20, "startup_seconds": 30, **options,
        },
    )  # fmt: skip


def one_device() -> list[str]:
    cases = [
        ("gpipe 2-2", "none", {}),
        ("1f1b 2-2", "none", {"clip_norm": 0.1}),
        ("1f1b 3-1", "layers", {}),
        ("1f1b 1-3", "stage", {}),
        ("1f1b 4", "none", {"grad_scaler": partial(torch.amp.GradScaler, "cpu", init_scale=64.0)}),
        ("chimera", "none", {}),
    ]
    found = []
    for (name, recompute, options), kept in product(cases, EVERY):
        given = {key: make() if callable(make) else make for key, make in options.items()}
        theirs = {key: make() if callable(make) else make for key, make in options.items()}
        model, alone = (make_mlp(dropout=0.0, dtype=DOUBLE) for _ in range(2))
        plan = plan_for(name, model, recompute).with_reducer("fully-sharded", gathered_for=kept)
        reference = OneDevice(alone, plan.num_microbatches, optimizer=adamw, **theirs)
        far = 0.0
        with pipeline_of(plan, model, **given) as pipeline:
            for step in range(STEPS):
                batch = make_batch(24, DOUBLE, step)
                updates = step != 1  # the gradients of two minibatches make one update
                loss = pipeline.step(*batch, update=updates)
                wanted = reference.step(*batch, update=updates)
                far = max(far, abs(loss - wanted).item())
                with torch.no_grad():
                    there = alone(batch[0][:7])
                far = max(far, (pipeline.evaluate(batch[0][:7]) - there).abs().max().item())
            state = pipeline.gather_state_dict()
        if state.keys() != alone.state_dict().keys():
            found.append(f"{name} {kept}: other keys")
        far = max(
            [
                far,
                *((state[key] - own).abs().max().item() for key, own in alone.state_dict().items()),
            ]
        )
        if far > 1e-12:
            found.append(f"{name} {recompute} {kept}: {far}")
    return found


def trained(
    plan: Plan, batches, *, in_loop=False, before=None, **options
) -> dict[str, torch.Tensor]:
    """The weights after some minibatches."""
    model = make_mlp(dropout=0.1)
    if before is not None:
        model[2].register_forward_hook(before)
    with pipeline_of(plan, model, **options) as pipeline:
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


def going_on(plan: Plan, folder: Path, first: int, **options) -> dict[str, torch.Tensor]:
    """The weights after two steps of a run that goes on from a folder and saves there."""
    with pipeline_of(plan, make_mlp(dropout=0.1), **options) as pipeline:
        assert first == (pipeline.load(folder) or 0)
        for step in range(first, first + 2):
            pipeline.step(*make_batch(24, seed=step))
        pipeline.save(folder)
        return pipeline.gather_state_dict()


def checkpoint(folder: Path) -> list[str]:
    """One run in one layout after another, beside one in threads that goes on likewise."""
    own, found = folder / f"own-{dist.get_rank()}", []
    layouts = [
        ("1f1b 2-2", "fully-sharded", "use"),
        ("1f1b 1-3", "fully-sharded", "step"),
        ("gpipe 4", "sharded", "step"),
        ("1f1b 4", "fully-sharded", "use"),
        ("gpipe 3-1", "owners", "step"),
    ]
    for number, (name, reducer, kept) in enumerate(layouts):
        plan = plan_for(name, make_mlp())
        expected = going_on(plan, own, 2 * number, transport="threads")
        sharded = plan.with_reducer(reducer, gathered_for=kept)
        got = going_on(sharded, folder / "run", 2 * number)
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
    with pipeline_of(plan, model, loss=F.mse_loss) as pipeline:
        built = bytes_held()
        for _ in range(2):
            pipeline.step(*batch)
        stepped = bytes_held()
    share = 1 / copies
    wanted = {
        "built": (built, share),
        "at the first forward": (seen[0], share + (1 if kept == "step" else 2 / depth)),
        "at the second": (seen[1], 3 * share + (1 if kept == "step" else 2 / depth)),
        "after both": (stepped, 3 * share),
    }
    return [
        f"{kept} {when}: {(there - before) / whole:.3f} of the weights, wanted {right:.3f}"
        for when, (there, right) in wanted.items()
        if not right - slack / 2 <= (there - before) / whole <= right + slack
    ]


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
    found = []
    for kept in EVERY:
        model = nn.Sequential(
            *(kind(16, 16) for kind in (nn.Linear, nn.Linear, Wavering, nn.Linear))
        )
        plan = replicated(model, (4,), 8).with_reducer("fully-sharded", gathered_for=kept)
        try:
            with pipeline_of(plan, model) as pipeline:
                pipeline.step(*make_batch(24))
            found += [] if kept == "step" else ["nobody has noticed"]
        except PenstockError as error:
            right = kept == "use" and "have run different layers" in str(error)
            found += [] if right else [f"{kept}: {error}"]
    return found


def ends(victim: int, how: str, folder: Path) -> list[str]:
    """What a training ends with in which one rank dies in a layer, or raises there."""
    calls = []

    def fail(*_) -> None:
        calls.append(None)
        if len(calls) == 8 and dist.get_rank() == victim:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a layer that raises")

    plan = plan_for("1f1b 2-2", make_mlp()).with_reducer("fully-sharded", gathered_for="use")
    start = time.monotonic()
    try:
        trained(plan, [make_batch(24, seed=k) for k in range(9)], before=fail)
    except PenstockError as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return []


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[-1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compares = {
        "one device": one_device,
        "owners": owners,
        "checkpoint": partial(checkpoint, folder),
        "held": held,
        "other ways": other_ways,
    }
    if case in compares:
        found = compares[case]()
    else:
        victim, how = case.split()
        found = ends(int(victim), how, folder)
    (folder / f"report-{dist.get_rank()}.json").write_text(json.dumps(found))
    if case in compares:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
