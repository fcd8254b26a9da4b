"""Stages that share the memory of a rank run forward twice where it binds, and nowhere else."""

from __future__ import annotations

from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace

from penstock import Cluster, Device, Group, LayerGraph, plan
from penstock.planning.planner.cuts import candidates
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.task import Task
from tests.kit.planning import chain, devices

MIB = 2**20


def language_model(num_blocks):
    """Blocks between a large embedding and a large head, as those of a model of 70 billion
    parameters are to each other, in mebibytes."""
    embedding, *blocks, head = chain(
        num_blocks + 2,
        recompute_seconds=0.01,
        parameter_bytes=MIB,
        optimizer_bytes=2 * MIB,
        activation_bytes=2 * MIB,
        weight_kept_bytes=MIB,
    ).layers
    ends = {"parameter_bytes": 3 * MIB, "optimizer_bytes": 6 * MIB}
    embedding = replace(embedding, activation_bytes=MIB // 10, **ends)
    head = replace(head, activation_bytes=3 * MIB, **ends)
    return LayerGraph(layers=(embedding, *blocks, head), input_bytes=MIB // 10)


@pytest.mark.parametrize("memory_mib", [60, 80, 120])
@pytest.mark.parametrize("family", ["interleaved-1f1b", "zb-v"])
def test_no_stage_recomputes_that_need_not(family, memory_mib):
    task = Task(language_model(38), devices(8, memory_bytes=memory_mib * MIB), 16)
    options = {"interleaved-1f1b": (("stages_per_rank", 4),)}.get(family, ())
    setting = Offer(family, tuple(range(8)), options=options).setting(task)
    proposed = candidates(task, setting)
    assert proposed
    for candidate in proposed:
        assert candidate.fits
        for stage, how in enumerate(candidate.recomputes):
            spared = (*candidate.recomputes[:stage], "none", *candidate.recomputes[stage + 1 :])
            assert how == "none" or not replaced(candidate, recomputes=spared).fits


def test_even_shares_of_a_rank_leave_nothing_free_that_would_spare_recomputing():
    task = Task(language_model(80), devices(16, memory_bytes=80 * MIB), 64)
    options = (("stages_per_rank", 4),)
    setting = Offer("interleaved-1f1b", tuple(range(16)), options=options).setting(task)
    for candidate in candidates(task, setting):
        assert 64 - candidate.recomputes.count("none") <= 44


def test_a_device_that_shares_no_memory_stands_beside_those_that_do():
    """Its stages weigh nothing where cuts are chosen for a shared one, also without any room."""
    two, alone = devices(2).devices, Device(name="alone", memory_bytes=40 * 2**10)
    host = Group(name="host", members=tuple(own.name for own in two), memory_bytes=60 * 2**10)
    cluster = Cluster(devices=(*two, alone), groups=(host,))
    made = plan(chain(6), cluster, microbatches=4, schedule="1f1b", stages=3)
    held = dict(zip((own.name for own in made.devices), made.rank_bytes, strict=True))
    assert held["alone"] <= 40 * 2**10
    assert sum(held.values()) - held["alone"] <= 60 * 2**10
