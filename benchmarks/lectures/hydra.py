"""Hydra: many models larger than a device, beside GPipe and naive model parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from msgspec.structs import replace

import penstock as pk
from benchmarks.lectures.answer import Answer
from benchmarks.lectures.claims import HYDRA_BELOW_GPIPE, HYDRA_LESS_ENERGY, HYDRA_OVER_NAIVE
from benchmarks.lectures.measured import figure
from benchmarks.lectures.transformers import Sizes, estimated
from penstock.planning.turns import TimedJob, simulate_fleet, visits_of

_GPT2_XL = Sizes(1600, 48, 25)
_HOST, _NUM_DEVICES, _MEMORY_BYTES = "dgx-v100", 8, 16 * 10**9
_NUM_MODELS, _ROWS, _STEPS = 12, 8, 4
_PCIE_BYTES_PER_SECOND = 6e9
"""Of a device to main memory, where two share a switch."""

_PATIENCE_SECONDS = 5.0


@cache
def _graph() -> pk.LayerGraph:
    return estimated(_GPT2_XL, torch.optim.AdamW, torch.float32)


def _flushed(microbatches: int) -> float:
    """Seconds of a minibatch over all devices, one stage on each."""
    return pk.plan(
        _graph(), pk.Cluster.of(_HOST), schedule="gpipe", replicas=(1,) * _NUM_DEVICES,
        minibatch=_ROWS, microbatches=microbatches, memory_bytes=_MEMORY_BYTES, recompute="stage",
        patience_seconds=_PATIENCE_SECONDS,
    ).step_seconds  # fmt: skip


def _fleet() -> float:
    """Seconds per minibatch of a fleet whose models are spilled, longest first."""
    tier = pk.Tier(
        kind="host",
        read_bytes_per_second=_PCIE_BYTES_PER_SECOND,
        write_bytes_per_second=_PCIE_BYTES_PER_SECOND,
    )
    cluster = replace(pk.Cluster.of(_HOST, devices_per_host=1), tiers=(tier,))
    plan = pk.plan(
        _graph(), cluster, minibatch=_ROWS, memory_bytes=_MEMORY_BYTES, spill="always",
        patience_seconds=_PATIENCE_SECONDS,
    )  # fmt: skip
    visits = visits_of(plan)
    jobs = [
        TimedJob(f"model-{number}", visits, _STEPS, tier=f"link-{number}")
        for number in range(_NUM_MODELS)
    ]
    return simulate_fleet(jobs, _NUM_DEVICES).makespan / (_NUM_MODELS * _STEPS)


def hydra() -> Iterator[Answer]:
    """Fine-tuning of twelve GPT-2 with 1.5 billion parameters on eight V100 of 16 GB."""
    fleet, gpipe, naive = _fleet(), _flushed(_ROWS), _flushed(1)
    where = f"{_NUM_MODELS} × GPT-2 XL on 8 V100"
    below = 1 - fleet / gpipe
    yield Answer(
        f"Hydra's runtime below GPipe's, {where}",
        f"up to {HYDRA_BELOW_GPIPE:.0%}",
        f"{below:.0%}",
        below / HYDRA_BELOW_GPIPE,
        note="Ninety would take a pipeline whose devices are idle nine tenths of the time.",
        measured=figure("Hydra below GPipe"),
    )
    yield Answer(
        f"Hydra over naive model parallelism, {where}",
        f"{HYDRA_OVER_NAIVE:.0f}×",
        f"{naive / fleet:.1f}×",
        naive / fleet / HYDRA_OVER_NAIVE,
        note="Eight devices at most, less what recompute takes.",
        measured=figure("Hydra over naive model parallelism"),
    )
    yield Answer(
        f"Hydra's energy, {where}",
        f"up to {HYDRA_LESS_ENERGY}× less",
        "no prediction",
        note="Estimates know seconds and bytes, no joules.",
        measured="not measured: this machine tells no joules",
    )
