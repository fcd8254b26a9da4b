"""What a fleet shows while it runs, and its results as text."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import penstock as pk
from tests.kit.spilling import make_net, spilled_plan
from tests.kit.training import adamw


def fleet():
    model = make_net()
    pairs = [(torch.zeros(16, 16), torch.arange(16) % 4)]
    plan = spilled_plan(model)
    given = {"loss": F.cross_entropy, "optimizer": adamw, "metrics": {"right": accuracy}}
    good = pk.Job(model, plan, pairs, **given)
    bad = pk.Job(make_net, plan, [(1, 2)], **given)
    return pk.Fleet({"good": good, "bad": bad})


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def test_in_a_terminal_a_table_elsewhere_a_line_per_job(capsys, monkeypatch):
    with fleet() as running:
        results = running.run(steps=2, show=True)
        told = capsys.readouterr().err.splitlines()
        # A loaded machine takes long enough to say so.
        lines = [line for line in told if not line.startswith("penstock: ")]
        assert len(lines) == 2
        assert any(line.startswith("good: done at step 2, loss 1.") for line in lines)
        assert any(line.startswith("bad: failed at step 0, loss –") for line in lines)
        assert running.run(steps=3)["good"].steps == 3
        assert capsys.readouterr().err == ""
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "120")
        running.run(steps=4)
        shown = capsys.readouterr().err
        for part in ("device time", "good", "done", "bad", "failed"):
            assert part in shown
    table = str(results).splitlines()
    assert table[0].split() == ["job", "status", "steps", "loss", "device", "time"]
    assert table[1].split()[:3] == ["good", "done", "2"]
    assert table[2].split()[:4] == ["bad", "failed", "0", "–"]
    assert "inputs hold no tensor" in table[2]
    assert "× the bound" in table[3]


def test_what_is_compared_may_be_a_metric_of_which_more_is_better():
    with fleet() as running:
        results = running.run(pk.stop.halving("right", every=1, largest=True, steps=2))
    assert list(results["good"].metrics) == ["right"]
    assert len(results["good"].metrics["right"]) == 2
    assert results["good"].value == results["good"].metrics["right"][0]
    assert results.best.name == "good"
    stop = pk.stop.halving("right", every=1, largest=True)
    nan = float("nan")
    assert stop.survivors({"a": 0.1, "b": nan, "c": 0.3, "d": 0.3}, 4) == ["c", "d"]
