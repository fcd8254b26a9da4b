"""What crosses devices keeps its bits: strides, buffers that forwards write, and data."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.base.errors import StageError
from penstock.engine.device import queue
from penstock.engine.run import copies
from tests.kit.examples import in_turns
from tests.kit.helpers import Lambda
from tests.kit.on_devices import EMULATED, assert_right
from tests.kit.training import pipeline_of, sgd
from tests.numerics.test_strides import MODELS, Skipping

pytestmark = pytest.mark.usefixtures("accelerator")


@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    in_turns(itertools.product(MODELS, ["gpipe", "zb-h1"], ["none", "layers"]), 3),
)
def test_strides_survive_the_way_to_another_device(name, schedule, recompute):
    _, cut, shape = MODELS[name]()

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*MODELS[name]()[0])

    def batch(rows, seed):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(rows, *shape, generator=generator)
        return inputs, torch.randint(0, 3, (rows,), generator=generator)

    options = {"schedule": schedule, "recompute": recompute, "cuts": [cut], "optimizer": sgd}
    for devices in (["emu:1", "emu:0"], ["cpu", "emu:0"], ["emu:0", "cpu"]):
        assert_right(EMULATED, build, batch, devices, num_microbatches=2, **options)


def test_a_skip_with_gaps_keeps_them():
    def build():
        torch.manual_seed(0)
        return Skipping()

    def batch(rows, seed):
        torch.manual_seed(seed)
        return torch.randn(rows, 4, 16), torch.randint(0, 3, (rows,))

    assert_right(EMULATED, build, batch, ["emu:1", "emu:0"], cuts=[2], optimizer=sgd)


class CountingHead(nn.Linear):
    """Keeps account of its forwards in two ways, and computes with what it has counted."""

    def __init__(self, weight):
        super().__init__(6, 7, bias=False)
        self.weight = weight
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("written", torch.zeros(()))

    def forward(self, value):
        self.assigned = self.assigned + 1
        self.written += 2
        return super().forward(value) / (self.assigned + self.written)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.middle = nn.Linear(6, 6)
        self.head = CountingHead(self.embedding.weight)

    def spine(self):
        return [self.embedding, self.middle, self.head]


def words(rows, seed):
    drawn = torch.randint(0, 7, (2, rows), generator=torch.Generator().manual_seed(seed))
    return drawn[0], drawn[1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_what_a_layer_with_a_tied_weight_writes_becomes_the_models(schedule):
    """The rank of the head has a copy of the head, since the embedding has the weight."""
    model = assert_right(EMULATED, Counting, words, ["emu:2", "emu:1"], cuts=[2], schedule=schedule)
    assert model.head.assigned.item() == 5 * 4  # steps and an evaluation of four microbatches
    assert model.head.written.item() == 2 * 5 * 4
    assert str(model.head.assigned.device) == str(model.head.written.device) == "emu:1"


class Shifted(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
        self.register_buffer("shift", torch.full((width,), 0.5))

    def forward(self, value):
        return super().forward(value) + self.shift


def test_buffers_cross_devices_only_when_they_have_changed(monkeypatch):
    crossed = []

    def counting(tensor, device):
        crossed.append(tensor)
        return moved(tensor, device)

    moved = copies.moved
    monkeypatch.setattr(copies, "moved", counting)

    def run(devices):
        """The losses of four steps, and how many buffers had crossed before each of them."""
        torch.manual_seed(0)
        model = nn.Sequential(Shifted(8), nn.ReLU(), Shifted(8))
        losses, counts = [], []
        with pipeline_of(model, "chimera", optimizer=sgd, devices=devices) as pipeline:
            for step in range(4):
                if step == 2:
                    model[0].shift.mul_(3)
                if step == 3:
                    model[2].shift = torch.full((8,), 0.1, device=model[2].shift.device)
                torch.manual_seed(step)
                losses.append(pipeline.step(torch.randn(8, 8), torch.arange(8)).cpu())
                counts.append(len(crossed))
        return torch.stack(losses), counts

    (ours, counts), (theirs, _) = run(["emu:1", "emu:0"]), run("cpu")
    assert torch.equal(ours, theirs)
    at_first = counts[0]
    assert at_first >= 2  # each rank runs both layers, and one of them is the other's
    assert counts == [at_first, at_first, at_first + 1, at_first + 2]


class CopiedBytes(TorchDispatchMode):
    """Counts, by dtype, the bytes that this thread copies."""

    def __init__(self):
        super().__init__()
        self.by_dtype = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in {torch.ops.aten.clone, torch.ops.aten._to_copy}:
            self.by_dtype[result.dtype] += result.nbytes
        return result


@pytest.mark.parametrize("place", ["cpu", "pinned", "emu:1", "emu:3", "emu:2"])
def test_data_is_copied_once_wherever_it_comes_from(monkeypatch, place):
    inputs = torch.randn(8, 16, dtype=torch.float64)
    targets = torch.randint(0, 4, (8,))
    given = [t.pin_memory() if place == "pinned" else t.to(place) for t in (inputs, targets)]
    by_threads = Counter()
    moved = queue.moved

    def counting(tensor, device, **how):
        if threading.current_thread() is not threading.main_thread():
            by_threads[tensor.dtype] += tensor.nbytes
        return moved(tensor, device, **how)

    model = nn.Sequential(Lambda(lambda value: value.float()), nn.Linear(16, 8), nn.Linear(8, 4))
    with pipeline_of(model, cuts=[2], optimizer=sgd, devices=["emu:1", "emu:3"]) as pipeline:
        monkeypatch.setattr(queue, "moved", counting)
        with CopiedBytes() as by_caller:
            pipeline.step(*given)
    for tensor in (inputs, targets):
        assert by_caller.by_dtype[tensor.dtype] == tensor.nbytes
        assert by_threads[tensor.dtype] == 0


@pytest.mark.parametrize("place", ["cpu", "pinned", "emu:0", "emu:1", "emu:2"])
def test_a_loader_may_use_its_memory_again(place):
    """Also while minibatches that it gave before are still under way."""

    def run(devices):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
        inputs, targets = torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64)
        if devices != "cpu":
            inputs, targets = (
                t.pin_memory() if place == "pinned" else t.to(place) for t in (inputs, targets)
            )

        def load():
            for seed in range(6):
                generator = torch.Generator().manual_seed(seed)
                inputs.copy_(torch.randn(8, 16, generator=generator))
                targets.copy_(torch.randint(0, 4, (8,), generator=generator))
                yield inputs, targets
                inputs.zero_()
                targets.zero_()

        with pipeline_of(model, optimizer=sgd, devices=devices) as pipeline:
            return torch.stack([loss.cpu() for loss in pipeline.steps(load())])

    assert torch.equal(run(["emu:1", "emu:0"]), run("cpu"))


def test_only_pinned_memory_keeps_the_host_waiting(accelerator):
    """For the copy and for nothing else, since the copy waits for nothing."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    inputs, targets = torch.randn(8, 16), torch.randint(0, 4, (8,))
    with pipeline_of(model, optimizer=sgd, devices=["emu:1", "emu:0"]) as pipeline:
        pipeline.step(inputs, targets)
        for device in range(4):
            accelerator.reset_host_counts(device)
        pipeline.step(inputs.pin_memory(), targets)
        assert [accelerator.host_waits(device) for device in range(2)] == [0, 1]
        assert [accelerator.host_reads(device) for device in range(2)] == [0, 0]


def test_a_batch_that_fits_on_no_device_names_the_stage_that_it_was_for(accelerator):
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    with pipeline_of(model, optimizer=sgd, devices=["emu:1", "emu:0"]) as pipeline:
        pipeline.step(torch.randn(8, 16), torch.arange(8) % 4)
        accelerator.set_memory_limit(accelerator.memory_allocated(1), 1)
        with pytest.raises(StageError, match=r"stage 0, given its inputs: .*out of memory"):
            pipeline.step(torch.randn(8, 16), torch.arange(8) % 4)
