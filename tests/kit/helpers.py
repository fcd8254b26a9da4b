"""Small models and plans that several test files use."""

from __future__ import annotations

import functools
import itertools

import torch
from hypothesis import strategies as st
from torch import nn

from penstock import versions
from penstock.base.errors import InputError
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.op import COMPUTE
from penstock.engine.model import tree
from penstock.engine.model.spine import run_spine, spine_fingerprint, spine_of
from penstock.planning.plans import Plan, StagePlan

MLP_LAYERS = 6


def amounts(most):
    """Numbers from 0 to ``most`` that people can mean: none is tiny and yet not 0."""
    return st.floats(0, most).map(lambda number: number if number >= 1e-9 else 0.0)


def runnable_families() -> list[str]:
    """The names of the fixed families that the runtime performs."""
    return sorted({name for name, _, _ in runnable_cases((2,), (8,))})


def runnable_cases(ranks, microbatches) -> list[tuple[str, int, int]]:
    """(family that flushes, ranks, microbatches) that the runtime performs on ``make_mlp``:
    a family may refuse a count, and several stages per rank may want more layers."""
    fixed = [name for name in families.names() if name not in {*families.SEARCHED, *versions.USUAL}]
    return [case for case in itertools.product(fixed, ranks, microbatches) if _runs(*case)]


@functools.cache
def _runs(name: str, num_ranks: int, count: int) -> bool:
    """Many files ask for many of the same cases, whenever tests are collected."""
    full = _whole(name, num_ranks)
    if full is None or full.num_slices > 1 or full.num_stages > MLP_LAYERS:
        return False
    try:
        built = families.build(name, num_ranks=num_ranks, num_microbatches=count)
    except InputError:
        return False
    return built.stages_of == full.stages_of  # or too few microbatches for all copies of the stages


@functools.cache
def _whole(name: str, num_ranks: int) -> Schedule | None:
    try:
        return families.build(name, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
    except InputError:
        return None


def make_plan(
    model, num_ranks, num_microbatches, schedule="1f1b", cuts=None, recompute="none"
) -> Plan:
    """A plan for ``model`` without a profile: cut evenly, or before the given layers."""
    layers = spine_of(model)
    count = len(layers)
    # Stages and their ranks are the same for any number of microbatches.
    built = families.build(schedule, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
    rank_of = {stage: rank for rank, own in enumerate(built.stages_of) for stage in own}
    num_stages = built.num_stages
    cuts = cuts or [round(index * count / num_stages) for index in range(1, num_stages)]
    borders = [0, *cuts, count]
    return Plan(
        model=spine_fingerprint(layers),
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_threads=1,
        stages=tuple(
            StagePlan(
                layers=tuple(layer.name for layer in layers[a:b]),
                rank=rank_of[stage],
                recompute=recompute,
            )
            for stage, (a, b) in enumerate(itertools.pairwise(borders))
        ),
    )


def same_order_families() -> list[str]:
    """Those whose sums over microbatches have the order of one device, so that results are equal to
    the bit. Chimera halves the microbatches between two copies of every stage."""
    return [name for name in runnable_families() if name != "chimera"]


def make_mlp(dropout=0.3, dtype=torch.float32, seed=0) -> nn.Sequential:
    """Six layers, with in-place activations and dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(32, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 4),
    ).to(dtype)


def make_batch(rows=13, dtype=torch.float32, seed=1):
    """(inputs, targets) for ``make_mlp``."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 16, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(0, 4, (rows,), generator=generator)


def wanting(value):
    """A value as a trained stage hands it on: what can have a gradient wants one."""

    def leaf(tensor):
        wants = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(wants)

    return tree.replace(torch.Tensor, leaf, value)


class Lambda(nn.Module):
    """A function as a layer, and the modules it uses."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function = function
        self.modules_used = nn.ModuleList(modules)

    def forward(self, value):
        return self.function(value, *self.modules_used)


class Net(nn.Module):
    """Layers one after the other; some may stash and recall skips."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def spine(self):
        return list(self.layers)

    def forward(self, value):
        return run_spine(self.spine(), value)


def compute_only(schedule: Schedule) -> Schedule:
    """Undo the passes: the compute ops in their order."""
    ranks = (tuple(op for op in ops if op.kind in COMPUTE) for ops in schedule.ranks)
    return Schedule.of(ranks, schedule.name)
