"""What a watch shows is what was trained: its work, how fast it was done, and in what memory."""

from __future__ import annotations

import copy
import io
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import penstock as pk
from penstock.base.errors import InputError
from penstock.demo import gpt
from penstock.engine.device import accelerators
from penstock.engine.model.flops import count_flops
from penstock.engine.run.history import Work
from penstock.training.fitting import places, watching
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.training import pipeline_of, sgd

ROWS = 8
LOADER = [make_batch(ROWS, seed=seed) for seed in range(4)]
RATES = {"steps_per_second", "rows_per_second", "flops_per_second"}
MEASURED = {"bubble", "memory_bytes/rank 0", "memory_bytes/rank 1"}


class Run:
    """Has what a run of wandb has."""

    def __init__(self):
        self.rows = []

    def log(self, numbers, step):
        self.rows.append({"step": step, **numbers})


def watched(*more, loader=LOADER, options=None, **how):
    """What a watch tells a run in a training."""
    run = Run()
    with pipeline_of(make_mlp(0.0), **{"optimizer": sgd, **(options or {})}) as pipeline:
        pk.fit(pipeline, loader, watch=pk.Watch([run, *more], **how), progress=False)
    return run.rows


def test_numbers_of_each_step_have_their_names():
    rows = watched()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # How long the first step took, nobody knows.
    assert {*rows[0]} == {"step", "loss", "lr"} | MEASURED
    assert all({*row} == {"step", "loss", "lr"} | MEASURED | RATES for row in rows[1:])
    assert all(type(value) in (int, float) for row in rows for value in row.values())
    assert all(0 <= row["bubble"] < 1 for row in rows)
    assert all(row["rows_per_second"] == ROWS * row["steps_per_second"] for row in rows[1:])
    assert [row["step"] for row in watched(every=2)] == [2, 4]
    told = watched(options={"results": "none", "record": True})
    assert {*told[-1]} == {"step", "lr"} | MEASURED | RATES


def flops_of(model, inputs):
    """As torch counts them, where all of attention is matrix products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(inputs).sum().backward()
    model.zero_grad()
    return counter.get_total_flops()


def test_operations_are_those_that_torch_counts():
    rows = watched(peak_flops=1e9)
    expected = flops_of(make_mlp(0.0), LOADER[0][0])
    for row in rows[1:]:
        assert row["flops_per_second"] == pytest.approx(expected * row["steps_per_second"])
        # Each of two ranks has a device.
        assert row["peak_share"] == pytest.approx(row["flops_per_second"] / 2e9)
    assert "peak_share" not in watched()[-1]


@pytest.mark.parametrize("schedule", ["1f1b", "seq1f1b", "pipedream"])
def test_tokens_and_operations_of_a_language_model(schedule):
    model = gpt.GPT(width=16, heads=2, layers=3, context=8, dropout=0.1)
    tokens = torch.randint(0, 256, (6, 8))
    options = {"num_microbatches": 3, "loss": gpt.loss, "optimizer": sgd}
    with pipeline_of(model, schedule, **options) as pipeline:
        with pytest.raises(InputError, match="no step yet"):
            _ = pipeline.work
        expected = Work(6, 48, flops_of(copy.deepcopy(model), tokens))
        for _ in pipeline.steps([(tokens, tokens), (tokens, tokens)]):
            assert pipeline.work == expected  # while ranks are at work
        pipeline.step(tokens[:3], tokens[:3])
        assert pipeline.work == (3, 24, expected.flops // 2)


class Looking(nn.Linear):
    """Wants to know what comes."""

    def forward(self, value):
        return super().forward(value) * (1.0 if value.sum() > 0 else 2.0)


class Placed(nn.Linear):
    """Makes tensors where it was written for, and has one that is no buffer."""

    shift = torch.ones(4)

    def forward(self, value):
        made = torch.arange(4, device="cpu", dtype=value.dtype)
        return super().forward(value) + made + self.shift


def test_operations_are_counted_without_values_and_leave_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Placed(4, 4))
    model.append(nn.Linear(4, 4))
    model[-1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    inputs = torch.randn(6, 4)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = count_flops([*model], inputs)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found == flops_of(model, inputs) == (3 + 3 + 2) * 2 * 6 * 4 * 4
    assert count_flops([Looking(4, 4)], inputs) is None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert count_flops([*model], inputs) == 3 * 2 * 6 * 4 * 4


def test_what_cannot_be_counted_is_left_out():
    run = Run()
    model = nn.Sequential(Looking(16, 16), nn.Linear(16, 4))
    with pipeline_of(model, optimizer=sgd) as pipeline:
        pk.fit(pipeline, LOADER, watch=pk.Watch(run, peak_flops=1e9), progress=False)
        assert pipeline.work == Work(ROWS, None, None)
    assert {*run.rows[-1]} == {"step", "loss", "lr"} | MEASURED | RATES - {"flops_per_second"}


@pytest.mark.parametrize("counts", [False, True])
def test_memory_of_each_rank_is_what_it_holds_and_its_most_activations(counts):
    model, (inputs, targets) = make_mlp(0.0), LOADER[0]
    graph = pk.profile(
        model, inputs[:2], loss=F.cross_entropy, targets=targets[:2], repeats=1, ranks=0
    )
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=4, stages=2, schedule="1f1b")
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=sgd, count_memory=counts
    ) as pipeline:
        pipeline.step(inputs, targets)
        held = pipeline.memory_bytes
        activations = [math.ceil(kept) for kept in pipeline.timeline.peak_bytes(plan.sizes)]
        if counts:
            activations = [peak.activation_bytes for peak in pipeline.peaks]
    assert min(activations) > 0
    assert held == tuple(
        stage.state_bytes + kept for stage, kept in zip(plan.stages, activations, strict=True)
    )


def test_evaluations_take_no_time_from_steps(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 4.0, 100.0, 100.0, 102.0])
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    rates = watching._Rates()
    rates.add(Work(4, None, 10))  # it has begun at some time before 0
    for _ in range(2):
        rates.add(Work(4, None, 10))
    assert rates.taken(20.0) == {
        "steps_per_second": 1.0, "rows_per_second": 4.0, "flops_per_second": 10.0,
        "peak_share": 0.5,
    }  # fmt: skip
    assert rates.taken(20.0) == {}
    rates.begin()
    rates.add(Work(2, 6, None))
    assert rates.taken(20.0)["tokens_per_second"] == 3.0


def test_an_evaluation_is_no_slow_step(monkeypatch):
    run, now = Run(), [0.0]

    def evaluate(pipeline):
        now[0] += 1e6
        return torch.tensor(1.0)

    def monotonic():
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=monotonic))
    with pipeline_of(make_mlp(0.0), optimizer=sgd) as pipeline:
        pk.fit(pipeline, LOADER, epochs=2, evaluate=evaluate, watch=run, progress=False)
    rates = [row["steps_per_second"] for row in run.rows if "steps_per_second" in row]
    assert len(rates) == 2 * len(LOADER) - 1 and min(rates) > 0.01


def test_held_out_losses_are_written_and_only_the_first_process_writes(monkeypatch):
    run = Run()
    with pipeline_of(make_mlp(0.0), optimizer=sgd) as pipeline:
        pk.fit(pipeline, LOADER, evaluate=LOADER[0], watch=run, progress=False)
        assert {*run.rows[-1]} == {"step", "held_out_loss"}
        monkeypatch.setattr(pk.Pipeline, "is_first", False)
        run.rows.clear()
        pk.fit(pipeline, LOADER, evaluate=LOADER[0], watch=run, progress=False)
        assert not run.rows


def test_without_a_terminal_it_takes_lines(monkeypatch, capfd):
    monkeypatch.delenv("PENSTOCK_QUIET", raising=False)
    monkeypatch.setattr(places, "_LINE_SECONDS", 0.0)
    with pipeline_of(make_mlp(0.0), optimizer=sgd) as pipeline:
        pk.fit(pipeline, LOADER, evaluate=LOADER[0], watch="terminal")
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 3", "step 4", "step 4"]
    for part in ("loss ", " lr 0.1", " rows/s", "FLOP/s", "bubble ", "memory of rank "):
        assert part in lines[0]
    assert lines[-1].startswith("step 4: held out loss ")
    monkeypatch.setenv("PENSTOCK_QUIET", "1")
    with pipeline_of(make_mlp(0.0), optimizer=sgd) as pipeline:
        pk.fit(pipeline, LOADER, evaluate=LOADER[0], watch="terminal")
    assert capfd.readouterr().err == ""


class Screen(io.StringIO):
    """A terminal that is read."""

    def isatty(self):
        return True


def test_in_a_terminal_it_is_a_table(monkeypatch):
    monkeypatch.delenv("PENSTOCK_QUIET", raising=False)
    monkeypatch.setattr(places, "_FRAME_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Screen())
    with pipeline_of(make_mlp(0.0), optimizer=sgd) as pipeline:
        pk.fit(pipeline, LOADER, watch="terminal")
    drawn = sys.stderr.getvalue()
    assert "step 2" in drawn and "step 4" in drawn and "steps/s" in drawn
    assert "memory of rank 0" in drawn and "memory of rank 1" in drawn


def test_of_many_ranks_the_one_with_most_memory_is_shown():
    memory = {f"{places.MEMORY}{rank}": 1024.0 * (rank % 10) for rank in range(12)}
    told = dict(places._told({"flops_per_second": 2.5e12, **memory}, in_line=False))
    assert told == {"": "2.5 TFLOP/s", "memory of rank 9": "9 KiB"}


def test_tensorboard_reads_what_is_written_for_it(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = watched("tensorboard", folder=tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {*events.Tags()["scalars"]} == {*rows[-1]} - {"step"}
    read = [(event.step, event.value) for event in events.Scalars("loss")]
    assert read == [(row["step"], pytest.approx(row["loss"])) for row in rows]


class Wandb(SimpleNamespace):
    """Has what the module has; a run of its own ends when it is told."""

    def init(self):
        self.run = Run()
        self.run.finish = lambda: setattr(self, "run", None)
        self.begun = self.run
        return self.run


def test_the_run_of_wandb_under_way_is_used_or_one_is_begun_and_ended(monkeypatch):
    module = Wandb(run=None, begun=None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    told = watched("wandb")
    assert module.run is None
    assert [{*row} for row in module.begun.rows] == [{*row} for row in told]
    module.run = own = Run()
    watched("wandb")
    assert module.run is own and len(own.rows) == len(LOADER)


def test_a_watch_that_cannot_be_kept_is_refused(monkeypatch):
    for where in ("terminals", {}, [], ["terminal", 3], None):
        with pytest.raises(InputError, match="give 'terminal', 'tensorboard', 'wandb', a run"):
            pk.Watch(where)
    for options in ({"every": 0}, {"peak_flops": -1}, {"peak_flops": "many"}):
        with pytest.raises(InputError, match=r"every is 0|peak_flops is"):
            pk.Watch("terminal", **options)
    with pipeline_of(make_mlp(0.0)) as pipeline, pytest.raises(InputError, match="watch is 'tty'"):
        pk.fit(pipeline, LOADER, watch="tty")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="pip install tensorboard"):
        pk.Watch("tensorboard")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install wandb"):
        pk.Watch("wandb")


def test_all_places_are_closed():
    class Full(Run):
        def log(self, numbers, step):
            raise OSError("the disk is full")

    watch, ended = pk.Watch([Full(), Full()]), []

    def closing():
        ended.append(1)
        raise OSError("the disk is still full")

    for place, _ in watch._outlets:
        place.close = closing
    with (
        pipeline_of(make_mlp(0.0), optimizer=sgd) as pipeline,
        pytest.raises(OSError, match="the disk is full") as raised,
    ):
        pk.fit(pipeline, LOADER, watch=watch, progress=False)
    assert ended == [1, 1]
    assert raised.value.__notes__ == ["on_end failed, too: the disk is still full"]


def test_peaks_are_those_of_known_devices(monkeypatch):
    assert accelerators.peak_flops(torch.device("cpu")) is None
    names = {
        "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA L40S": 362e12,
        "NVIDIA L4": 121e12, "Tesla T4": 65e12, "something else": None,
    }  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr(accelerators, "accelerator_name", lambda _, name=name: name)
        assert accelerators.peak_flops(torch.device("cuda", 0)) == peak
