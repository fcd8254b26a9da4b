"""Pipelines in threads come and go, whether anybody closes them or not."""

from __future__ import annotations

import gc
import os
import threading

import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.waiting import until

NUM_PIPELINES = 300


def test_pipelines_closed_or_dropped_leave_no_threads_and_no_descriptors():
    model = make_mlp()
    plan = make_plan(model, 2, 2)
    batch = make_batch(4)
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(NUM_PIPELINES):
        pipeline = pk.Pipeline(model, plan, loss=F.cross_entropy)
        if number % 10 == 0:
            pipeline.step(*batch)
        if number % 2:
            pipeline.close()
    del pipeline
    gc.collect()
    assert until(lambda: threading.active_count() <= before[0])
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_pipeline_dropped_in_a_loop_over_steps_ends_its_threads():
    model = make_mlp()
    before = threading.active_count()
    pipeline = pk.Pipeline(model, make_plan(model, 2, 2), loss=F.cross_entropy)
    loop = pipeline.steps(make_batch(4, seed=step) for step in range(5))
    next(loop)
    assert threading.active_count() == before + 2
    del pipeline, loop
    gc.collect()
    assert until(lambda: threading.active_count() <= before)
    assert threading.active_count() == before
