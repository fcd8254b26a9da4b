"""What accelerators do besides computing: nobody waits for them; memory; several processes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.engine.device import captured_graphs
from penstock.engine.device.accelerators import backend_of_accelerators
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.launch import torchrun
from tests.kit.live import LEARN, frames_of, live_plan, pushed, stream_of, weights_apart
from tests.kit.on_devices import on_cpu
from tests.kit.training import pipeline_of, sgd

JOB = Path(__file__).parents[1] / "distributed" / "jobs" / "devices.py"

REFUSES_WAITS = {"cuda": "set_sync_debug_mode", "emu": "set_sync_debug_mode"}
"""By kind, the function of torch's module that raises where the host would wait for a value."""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05}], ids=["plain", "clipped"])
def test_no_step_waits_for_a_device(places, schedule, options):
    if places.kind not in REFUSES_WAITS:
        pytest.skip(f"torch cannot tell when the host waits for {places.kind}")
    refuse = getattr(torch.get_device_module(places.kind), REFUSES_WAITS[places.kind])
    batches = [make_batch(seed=seed) for seed in range(4)]
    options = {"optimizer": sgd, "devices": places.of(0, 1), **options}
    with pipeline_of(make_mlp(dropout=0.0), schedule, **options) as pipeline:
        pipeline.step(*batches[0])  # layers are looked at in their first run
        refuse("error")
        try:
            losses = [pipeline.step(*batch) for batch in batches]
            losses += pipeline.steps(batches)
        finally:
            refuse("default")
    assert torch.stack(on_cpu(losses)).isfinite().all()


def test_a_batch_in_pinned_memory_may_be_overwritten_at_once(places):
    def run(devices, pinned):
        model, losses = make_mlp(dropout=0.0), []
        with pipeline_of(model, optimizer=sgd, devices=devices) as pipeline:
            for seed in range(20):
                batch = make_batch(rows=4096, seed=seed)
                inputs, targets = (t.pin_memory() if pinned else t for t in batch)
                losses.append(pipeline.step(inputs, targets))
                inputs.fill_(torch.nan)
                targets.zero_()
        return torch.stack(on_cpu(losses))

    places.assert_equal(run(places.of(0, 1), True), run(places.of(0)[0], False))


def test_replayed_frames_are_those_of_eager_mode(places):
    """As graphs that the device has captured, which no machine without one can show."""
    if places.kind not in captured_graphs.KINDS:
        pytest.skip(f"torch captures nothing on {places.kind}")

    def run(replay):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
        plan, devices = live_plan(model, 2), places.of(0, 1)
        with stream_of(model, plan, replay=replay, devices=devices) as stream:
            results = pushed(stream, frames_of([LEARN] * 12))
        return on_cpu([result.output for result in results]), model

    (outputs, model), (expected, other) = run(True), run(False)
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert weights_apart(model, other, 1e-9) == []


WIDTH, NUM_LAYERS, ROWS = 1024, 8, 256


def test_memory_is_what_was_counted(places):
    """Weights lie where their stages are, and a step takes its gradients and what the meter counts,
    beside what kernels and the allocator take for themselves."""
    gc.collect()  # other tests have left pipelines behind
    devices = [torch.device(name) for name in places.of(0, 1)]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    rank_bytes = sum(parameter.nbytes for parameter in model.parameters()) // 2
    weights = {device: rank_bytes * devices.count(device) for device in devices}
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    before = {device: torch.accelerator.memory_allocated(device) for device in devices}
    options = {"loss": F.mse_loss, "optimizer": sgd, "count_memory": True, "devices": devices}
    with pipeline_of(model, **options) as pipeline:
        for device, expected in weights.items():
            taken = torch.accelerator.memory_allocated(device) - before[device]
            assert expected <= taken < expected * 1.1
        grown = [_growth(pipeline, batch, weights) for _ in range(2)][1]
        for device, gradients in weights.items():
            counted = [
                peak.activation_bytes
                for peak, place in zip(pipeline.peaks, devices, strict=True)
                if place == device
            ]
            assert max(*counted, rank_bytes) < grown[device] < 3 * (sum(counted) + gradients)


def _growth(pipeline, batch, devices):
    """By device, how much more memory than before is taken at most during a step."""
    start = {}
    for device in devices:
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        start[device] = torch.accelerator.memory_allocated(device)
    pipeline.step(*batch)
    for device in devices:
        torch.accelerator.synchronize(device)
    return {
        device: torch.accelerator.max_memory_allocated(device) - then
        for device, then in start.items()
    }


def test_two_processes_train_on_devices_of_their_own(places):
    if places.count < 2:
        pytest.skip("two processes need two accelerators")
    done = torchrun(JOB, 2, "two", "auto", places.kind)
    assert done.returncode == 0, done.output
    assert done.reports == {0: [], 1: []}


def test_links_are_measured_by_the_devices_own_library(places, tmp_path):
    if places.count < 2:
        pytest.skip("two processes need two accelerators")
    if backend_of_accelerators() is None:
        pytest.skip(f"torch.distributed has no backend for {places.kind}")
    path = tmp_path / "cluster.json"
    arguments = ("penstock.cli", "measure-cluster", "--seconds", "0.2", "-o", str(path))
    done = torchrun("-m", 2, *arguments, reports=False)
    assert done.returncode == 0, done.output
    assert '"gpu"' in path.read_text()
