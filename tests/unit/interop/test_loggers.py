"""What loggers write is what was trained, and can be read by what people read it with."""

from __future__ import annotations

import csv
import sys

import pytest

import penstock as pk
from penstock.base.errors import FileError, InputError
from penstock.interop.loggers import CSVLogger, RunLogger, TensorBoardLogger
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.training import pipeline_of, sgd

LOADER = [make_batch(8, seed=seed) for seed in range(4)]


class Run:
    """Has what a run of wandb has."""

    def __init__(self):
        self.rows = []

    def log(self, numbers, step):
        self.rows.append({"step": step, **numbers})


def logged(*loggers, **options):
    """Train with them, and give what they should have written."""
    given = {
        "optimizer": sgd,
        "clip_norm": 1.0,
        "metrics": {"right": lambda outputs, targets: (outputs.argmax(-1) == targets).sum()},
        **options,
    }
    run = Run()
    with pipeline_of(make_mlp(0.0), **given) as pipeline:
        pk.fit(
            pipeline, LOADER, evaluate=LOADER[:1], callbacks=[RunLogger(run), *loggers],
            progress=False,
        )  # fmt: skip
    return run.rows


def test_a_run_gets_all_numbers_of_each_step():
    rows = logged()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 4]
    assert all({*row} == {"step", "loss", "lr", "grad_norm", "right"} for row in rows[:-1])
    assert {*rows[-1]} == {"step", "held_out_loss"}
    assert all(type(value) in (int, float) for row in rows for value in row.values())
    assert {*logged(clip_norm=None, metrics={})[0]} == {"step", "loss", "lr"}
    told = logged(results="none", clip_norm=None)
    assert told == [{"step": step, "lr": 0.1} for step in (1, 2, 3, 4)]


def test_a_csv_file_is_gone_on_with(tmp_path):
    path = tmp_path / "new" / "log.csv"
    rows = logged(CSVLogger(path))
    logged(CSVLogger(path, every=2))
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [int(row["step"]) for row in read] == [1, 2, 3, 4, 4, 2, 4, 4]
    for ours, theirs in zip(read, rows, strict=False):
        told = {name: float(value) for name, value in ours.items() if value}
        assert told.pop("seconds") >= 0
        assert told == theirs
    with pytest.raises(FileError, match=r"has the columns step, .*; name another file"):
        logged(CSVLogger(path), metrics={})
    with pytest.raises(FileError, match="name another file"):
        logged(CSVLogger(tmp_path))


def test_tensorboard_reads_what_is_written_for_it(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = logged(TensorBoardLogger(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {*events.Tags()["scalars"]} == {"loss", "lr", "grad_norm", "right", "held_out_loss"}
    read = [(event.step, event.value) for event in events.Scalars("loss")]
    assert read == [(row["step"], pytest.approx(row["loss"])) for row in rows if "loss" in row]


def test_who_cannot_log_is_told(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="the run is a dict without a method log"):
        RunLogger({})
    RunLogger(None).write(1, {"loss": 1.0})  # the other processes'
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="pip install tensorboard"):
        logged(TensorBoardLogger(tmp_path))
    with pytest.raises(InputError, match="every is 0"):
        CSVLogger(tmp_path / "log.csv", every=0)
