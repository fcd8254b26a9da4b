"""``penstock verify``: a proof in one command, and exit status 1 where it fails."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from penstock import versions
from penstock.base.errors import InputError, ModelError
from penstock.cli import penstock
from penstock.training.pipeline import Pipeline
from penstock.trial import proof
from penstock.trial.reference.delayed_replay import DelayedReplay
from tests.kit.helpers import make_mlp, make_plan
from tests.kit.small_workload import workload
from tests.kit.streams import plan_for

SMALL = "tests.kit.small_workload:workload"
HERE = "tests.unit.cli.test_verify"


def two_rates():
    """Its second optimizers learn faster than its first."""
    rates = itertools.chain([0.1, 0.1], itertools.repeat(0.2))
    return dataclasses.replace(
        workload(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=next(rates))
    )


def unseeded():
    """Its model is another one at each call."""
    seeds = itertools.count()
    return dataclasses.replace(workload(), build_model=lambda: make_mlp(seed=next(seeds)))


def verify(*arguments):
    """Exit status, and what it says."""
    result = CliRunner().invoke(penstock, ["verify", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


@pytest.mark.parametrize("kind", ["zb-h1", "stash", "2bw"])
def test_a_run_that_is_saved_and_resumed_is_proven_too(kind, saved, monkeypatch):
    code, told = verify(saved(kind), SMALL, "--resume")
    assert code == 0
    assert "minibatches, saved after 2 and resumed, against" in told.replace("\n", " ")
    assert "equal to the bit" in told
    # Without the optimizer's state, momentum would begin anew.
    real = Pipeline.load
    monkeypatch.setattr(Pipeline, "load", lambda one, path: real(one, path, weights_only=True))
    code, told = verify(saved(kind), SMALL, "--resume")
    assert (code, "NOT equal" in told) == (1, True)


@pytest.fixture
def saved(tmp_path):
    """Writes a plan for the small workload, and gives its path."""

    def save(kind, microbatches=4):
        asynchronous = {"stash": versions.Stash(), "2bw": versions.DoubleBuffer()}
        plan = (
            plan_for(asynchronous[kind], 3, microbatches=microbatches, model=make_mlp())
            if kind in asynchronous
            else make_plan(make_mlp(), 2, microbatches, kind)
        )
        plan.save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    return save


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "stash", "2bw"])
def test_what_is_right_is_proven(saved, kind):
    status, told = verify(saved(kind), SMALL)
    assert status == 0
    last = " ".join(told.split()).rsplit("Proven: ", 1)[1]
    assert last.startswith("after 5 minibatches, losses and weights of ")
    assert "equal to the bit" in last
    assert ("delays and versions held are what the formulas say" in last) is (
        kind in ("stash", "2bw")
    )


def test_steps_and_float64_are_heeded(saved):
    path = saved("1f1b")
    status, told = verify(path, SMALL, "--steps", "2", "--float64", "--transport", "threads")
    assert status == 0
    assert "after 2 minibatches" in told
    both = [
        json.loads(verify(path, SMALL, "--steps", "2", "--json", *how)[1])["losses"]
        for how in ([], ["--float64"])
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-5)
    assert both[0] != both[1]


def test_the_table_has_formulas_beside_what_was_recorded(saved):
    _, told = verify(saved("stash", microbatches=2), SMALL)
    rows = [line.split() for line in told.splitlines() if line[:1].isdigit()]
    # After stage and layers ("2: 0 … 1"): delay, recorded, versions, held.
    assert [row[5:9] for row in rows] == [list("2233"), list("1122"), list("0011")]


def test_json_has_the_numbers(saved):
    status, told = verify(saved("2bw"), SMALL, "--json")
    answer = json.loads(told)
    assert status == 0
    assert answer["equal"] is answer["exact"] is True
    assert answer["losses"] == answer["reference_losses"]
    assert [one["recorded_delay"] for one in answer["stages"]] == [1, 1, 1]
    assert [one["held"] for one in answer["stages"]] == [[2], [2], [2]]


def test_another_optimizer_fails_and_says_where(saved):
    status, told = verify(saved("1f1b"), f"{HERE}:two_rates")
    words = " ".join(told.split())
    assert status == 1
    assert "NOT equal: the loss of minibatch 1 is the first that differs" in words
    assert "parameters and buffers differ, first '0.weight' of stage 0" in words
    status, told = verify(saved("1f1b"), f"{HERE}:two_rates", "--json")
    assert status == 1
    assert json.loads(told)["equal"] is False


def test_a_plan_run_with_other_versions_fails(saved, monkeypatch):
    def latest(model, cuts, policy, *args, **kwargs):
        return DelayedReplay(model, cuts, versions.Latest(), *args, **kwargs)

    monkeypatch.setattr(proof, "DelayedReplay", latest)
    status, told = verify(saved("stash"), SMALL)
    assert status == 1
    assert "NOT equal" in told and "of stage 0" in " ".join(told.split())


def test_what_cannot_be_proven_is_refused(saved, monkeypatch):
    with pytest.raises(InputError, match="gives other weights at each call"):
        verify(saved("1f1b"), f"{HERE}:unseeded")
    with pytest.raises(InputError, match="do not reach the steady state"):
        verify(saved("2bw"), SMALL, "--steps", "1")
    with pytest.raises(ModelError, match="is not for the demo's model"):
        verify(saved("1f1b"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="start it without torchrun"):
        verify(saved("1f1b"), SMALL)


def test_the_status_reaches_the_shell(saved):
    code = "from penstock.cli import main; main()"
    command = [sys.executable, "-c", code, "verify", saved("1f1b"), f"{HERE}:two_rates"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1
    assert "NOT equal" in found.stdout and "Traceback" not in found.stderr
