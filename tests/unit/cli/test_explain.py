"""``penstock explain``: the words say what the stream does, and the bound is PipeMare's."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import subprocess
import sys
from functools import partial

import click
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

from penstock import Cluster, Layer, LayerGraph, versions
from penstock import plan as find_plan
from penstock.base.errors import InputError, PenstockError
from penstock.cli import penstock
from penstock.core.schedule.op import Kind
from penstock.planning.plans.explanation import (
    check_stability,
    explain,
    stability_bound,
    steady_minibatch,
)
from penstock.trial import Workload
from penstock.trial.reference.delayed_replay import _StreamVersions
from tests.kit.command_line import refused, run, succeed
from tests.kit.examples import in_turns
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.planning import chain, devices
from tests.kit.tiny_models import Once

POLICIES = [
    versions.Latest(),
    versions.Latest(updates="minibatch"),
    versions.Stash(),
    versions.Stash(updates="minibatch"),
    versions.VerticalSync(),
    versions.DoubleBuffer(),
    versions.PipeMare(t2=0.3, updates="microbatch"),
    versions.PipeMare(t1=100, t2=0.3, t3=2),
    versions.Predict(),
    versions.Predict(rule="spectrain"),
]
GRAPH = LayerGraph(
    layers=tuple(
        Layer(
            name=name,
            forward_seconds=1.0,
            backward_input_seconds=1.0,
            backward_weight_seconds=1.0,
            parameter_bytes=1024,
            activation_bytes=512,
        )
        for name in "abcdefgh"
    )
)


def plan_of(policy, stages="4", microbatches=4, **how):
    """A plan for eight equal layers; stages are a count, or replicas as in 2-1."""
    replicas = stages if "-" in stages else None
    ranks = sum(map(int, stages.split("-")))
    return find_plan(
        GRAPH,
        Cluster.local(ranks),
        microbatches=microbatches,
        stages=None if replicas else ranks,
        versions=policy,
        replicas=replicas,
        **how,
    )


explained = partial(run, "explain")


@pytest.fixture
def saved(tmp_path):
    """Writes a plan, and gives its path."""

    def save(plan):
        plan.save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    return save


def test_the_bound_is_two_without_delay_one_at_one_and_falls():
    assert stability_bound(0) == pytest.approx(2)
    assert stability_bound(1) == pytest.approx(1)
    assert stability_bound(2) == pytest.approx((math.sqrt(5) - 1) / 2)
    assert stability_bound(3) == pytest.approx(0.4450418679)
    bounds = [stability_bound(delay / 4) for delay in range(200)]
    assert bounds == sorted(bounds, reverse=True)
    for wrong in (-1, math.inf, math.nan, "3", True):
        with pytest.raises(InputError, match="the delay is"):
            stability_bound(wrong)


@pytest.mark.parametrize("delay", range(12))
def test_beyond_the_bound_a_quadratic_grows_and_within_it_shrinks(delay):
    """w_{t+1} = w_t − αλ·w_{t−τ}: the largest root of z^{τ+1} − z^τ + αλ."""
    for factor, grows in ((0.999, False), (1.001, True)):
        polynomial = np.zeros(delay + 2)
        polynomial[0] = 1
        polynomial[1] -= 1
        polynomial[-1] += factor * stability_bound(delay)
        assert bool(max(abs(np.roots(polynomial))) > 1) is grows


def value_of(formula, k, size):
    """What a formula says at microbatch k."""
    number = re.sub(r", (less|predicted).*", "", formula).replace("−", "-")
    number = re.sub(r"⌊(\(?[^⌊⌋/]*\)?)/(\d+)⌋", r"(\1//\2)", number)
    number = re.sub(r"⌊(.*)/(\d+)⌋", r"((\1)//\2)", number)
    return max(0, eval(number, {"k": k, "t": k // size}))


@pytest.mark.parametrize(
    ("policy", "stages", "microbatches"),
    in_turns(itertools.product(POLICIES, ["1", "2", "4", "2-1", "1-2", "2-2"], [2, 4, 5, 6]), 11),
    ids=str,
)
def test_formulas_are_what_every_op_of_a_stream_reads(policy, stages, microbatches):
    try:
        plan = plan_of(policy, stages, microbatches)
    except PenstockError as error:
        assert "vertical sync" in str(error) or "needs minibatches" in str(error)
        return
    found = explain(plan)
    by_version = plan.simulate(8)
    checked = 0
    for row in by_version.rows:
        for op, version in zip(row.ops, row.versions, strict=True):
            stage = found.stages[op.stage]
            if op.kind is Kind.FORWARD and stage.forward.formula == "the newest":
                assert microbatches % len(stage.ranks)
                checked += 1
            elif op.kind is Kind.FORWARD:
                assert version == value_of(stage.forward.formula, op.microbatch, microbatches)
                checked += 1
            elif op.kind is Kind.BACKWARD and stage.backward.formula != "as its forward":
                assert version == value_of(stage.backward.formula, op.microbatch, microbatches)
    assert checked == 8 * microbatches * len(plan.stages)


@pytest.mark.parametrize("stages", ["1", "4", "2-1"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_examples_are_what_the_independent_replay_reads(policy, stages):
    if isinstance(policy, versions.VerticalSync) and stages == "2-1":
        return
    plan = plan_of(policy, stages)
    found = explain(plan)
    assert found.example >= 10
    assert found.example >= 4 * steady_minibatch(plan) or steady_minibatch(plan) == 0
    account = _StreamVersions(policy, plan.replicas, tuple(range(4, 400, 4)))
    for index, stage in enumerate(found.stages):
        read = account.read(index, found.example)
        assert (stage.forward.example, stage.backward.example) == (
            read.forward_version,
            read.backward_version,
        )


def test_memory_is_versions_and_drift_and_what_is_in_flight():
    stages = explain(plan_of(versions.Stash())).stages
    assert [stage.versions_held for stage in stages] == [4, 3, 2, 1]
    assert [stage.version_bytes for stage in stages] == [8192, 6144, 4096, 2048]
    assert [stage.activations_in_flight for stage in stages] == [4, 3, 2, 1]
    assert [stage.activation_bytes for stage in stages] == [4096, 3072, 2048, 1024]
    assert [stage.delay for stage in stages] == [3, 2, 1, 0]
    drift = explain(plan_of(versions.PipeMare(t2=0.3))).stages
    # The last stage has no delay to correct, so no δ.
    assert [stage.extra_bytes for stage in drift] == [2048, 2048, 2048, 0]
    assert {stage.versions_held for stage in drift} == {1}
    replicas = explain(plan_of(versions.Stash(), "2-1")).stages
    assert [stage.ranks for stage in replicas] == [(0, 1), (2,)]
    assert [stage.rate_factor for stage in replicas] == [2, 1]


def test_several_stages_per_rank_and_recomputing_are_counted_by_stage():
    plan = make_plan(make_mlp(), 2, 4, "interleaved-1f1b", recompute="stage")
    found = explain(plan)
    peaks = plan.simulate().in_flight
    assert [stage.ranks for stage in found.stages] == [(0,), (1,), (0,), (1,)]
    assert all(1 <= stage.activations_in_flight <= 4 for stage in found.stages)
    assert found.stages[3].activations_in_flight <= max(held for _, held in peaks[1]) * 2
    for stage, planned in zip(found.stages, plan.stages, strict=True):  # but one keeps all
        inputs = stage.activations_in_flight * planned.input_bytes
        assert stage.activation_bytes == inputs + planned.activation_bytes
    both_ways = explain(make_plan(make_mlp(), 2, 4, "chimera"))
    assert [stage.ranks for stage in both_ways.stages] == [(0, 1), (0, 1)]


def test_a_synchronous_plan_says_so_and_has_one_version(saved):
    told = explained(saved(plan_of(versions.Flush(), schedule="1f1b")))
    assert "Synchronous:" in told and "gradients are never old" in told
    assert "forward reads" not in told
    rows = [line.split() for line in told.splitlines() if re.match(r"\d\s+2: ", line)]
    assert [row[6] for row in rows] == ["1"] * 4
    found = explain(plan_of(versions.Flush(), schedule="1f1b"))
    assert found.synchronous
    assert {stage.stability_bound for stage in found.stages} == {2.0}


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (versions.Stash(), ["k−3", "as its forward", "reads the version that its forward read"]),
        (versions.DoubleBuffer(), ["t−1", "pipedream-2bw", "after every minibatch"]),
        (versions.PipeMare(t1=50, t2=0.3, t3=1, updates="microbatch"),
         ["k, less 3·δ", "whole from update 50 on", "first 1 minibatches are synchronous"]),
        (versions.Predict(), ["k−3, predicted 3 ahead", "predicted to be"]),
    ],
)  # fmt: skip
def test_policies_are_told_in_words_within_a_hundred_columns(saved, policy, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    path = saved(plan_of(policy))
    told = explained(path, "--learning-rate", "0.5", "--curvature", "14")
    assert all(len(line) <= 100 for line in told.splitlines())
    flat = " ".join(told.split())
    for word in [*words, "at k=1", "Momentum and Adam", "plain SGD on a quadratic"]:
        assert word in flat


def test_too_high_a_rate_is_warned_of_with_the_highest_that_is_not(saved):
    path = saved(plan_of(versions.Stash()))
    told = " ".join(explained(path, "--learning-rate", "0.1", "--curvature", "14").split())
    assert (
        "warning: stage 0: learning rate 0.1 × curvature 14 = 1.4 is beyond 0.445, the bound for a "
        "delay of 3 updates: lower the learning rate below 0.032, or train with less delay "
        "(versions.DoubleBuffer(): 1; a schedule that flushes: 0)" in told
    )
    assert "PipeMare(t1=…)" in told
    assert told.count("warning:") == 3
    assert (
        "stage 3: learning rate 0.1 × curvature 14 = 1.4 is within 2, the bound for gradients"
        in (told)
    )
    assert "warning" not in explained(path, "--learning-rate", "0.03", "--curvature", "14")


def test_half_of_what_is_needed_gives_the_other_half(saved):
    path = saved(plan_of(versions.DoubleBuffer()))
    rates = explained(path, "--curvature", "20")
    assert "largest rate" in rates and " 0.05" in rates and "warning" not in rates
    curvatures = explained(path, "--learning-rate", "0.25")
    assert "largest curvature at 0.25" in curvatures and "  4\n" in curvatures


def test_replicas_multiply_the_rate(saved):
    plan = plan_of(versions.Stash(), "2-1")
    checks = check_stability(explain(plan), 0.1, [8.0, 8.0])
    assert [check.product for check in checks] == pytest.approx([1.6, 0.8])
    assert [check.stable for check in checks] == [False, True]
    assert "× curvature 8 × 2 replicas = 1.6 is beyond 1" in checks[0].words
    assert checks[0].largest_rate == pytest.approx(1 / 16)
    assert "multiplied by their number" in " ".join(explained(saved(plan)).split())
    # An update per minibatch is a mean over all of it, and the rate is the user's.
    by_minibatch = explain(plan_of(versions.DoubleBuffer(), "2-1"))
    assert [stage.rate_factor for stage in by_minibatch.stages] == [1, 1]


def test_checks_refuse_what_they_cannot_compare():
    found = explain(plan_of(versions.Stash()))
    with pytest.raises(InputError, match="there are 1 curvatures, but the plan has 4 stages"):
        check_stability(found, 0.1, [1.0])
    with pytest.raises(InputError, match="learning rate is -1"):
        check_stability(found, -1, [1.0] * 4)
    flat = check_stability(found, 0.1, [0.0, -3.0, 1.0, 1.0])
    assert all(check.stable for check in flat)
    assert flat[0].largest_rate == flat[1].largest_rate == math.inf
    assert "= 0 is within" in flat[0].words


def small():
    return Workload(
        build_model=make_mlp,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD,
        batches=lambda: iter([make_batch(8)]),
    )


def only_once():
    return Workload(
        build_model=Recurrent,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD,
        batches=lambda: iter([make_batch(8)]),
    )


class Recurrent(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(16, 4), Twofold(), nn.Linear(4, 4))


class Twofold(nn.Module):
    def forward(self, value):
        return Once.apply(value)


def test_curvature_is_estimated_on_a_workload(saved):
    path = saved(make_plan(make_mlp(), 2, 4))
    answer = json.loads(
        explained(
            path, "--workload", "tests.unit.cli.test_explain:small", "--learning-rate", "1000",
            "--estimate-steps", "8", "--json",
        )
    )  # fmt: skip
    assert all(0.01 < one < 10 for one in answer["curvatures"])
    assert [one["stable"] for one in answer["stability"]] == [False, False]
    assert answer["largest_rates"] == pytest.approx([2 / one for one in answer["curvatures"]])
    fewer = json.loads(
        explained(
            path, "--workload", "tests.unit.cli.test_explain:small", "--estimate-steps", "1",
            "--json",
        )
    )  # fmt: skip
    assert all(a < b for a, b in zip(fewer["curvatures"], answer["curvatures"], strict=True))


def test_without_a_second_derivative_the_rest_is_still_told(saved):
    path = saved(make_plan(Recurrent(), 2, 4))
    result = succeed(
        "explain", path, "--workload", "tests.unit.cli.test_explain:only_once",
        "--learning-rate", "0.1",
    )  # fmt: skip
    assert "cannot be differentiated twice: Once" in result.stderr
    assert "give --curvature if you know it" in result.stderr
    assert "largest curvature at 0.1" in result.stdout


def test_contradictions_and_other_models_are_refused(saved):
    path = saved(plan_of(versions.Stash()))
    name = "tests.unit.cli.test_explain:small"
    assert "not both" in refused("explain", path, "--workload", name, "--curvature", "3")
    assert "another model" in refused("explain", path, "--workload", name)
    assert "--learning-rate" in refused("explain", path, "--learning-rate", "-1")


def test_json_has_it_all(saved):
    answer = json.loads(explained(saved(plan_of(versions.Stash())), "--json"))
    first = answer["explanation"]["stages"][0]
    example = answer["explanation"]["example"]
    assert first["forward"] == {"formula": "k−3", "example": example - 3}
    assert first["stability_bound"] == pytest.approx(0.4450418679)
    assert answer["curvatures"] is None and answer["stability"] == []


def test_explaining_leaves_torch_alone(saved):
    path = saved(plan_of(versions.Stash()))
    code = (
        "import sys\nfrom penstock.cli import penstock\n"
        f"penstock(['explain', {path!r}, '--learning-rate', '1', '--curvature', '2'], "
        "standalone_mode=False)\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True)


def test_it_has_a_name_and_help():
    assert isinstance(penstock.commands["explain"], click.Command)
    assert "how fast it may learn" in run("explain", "-h")


def test_where_the_seconds_of_a_step_go(tmp_path):
    """In words with a bar, and as numbers that add up."""
    path = tmp_path / "plan.json"
    plan_of(versions.Flush(), "2-1-1").save(path)
    shown = explained(str(path))
    assert "why: " in shown and "where the " in shown
    assert re.search(r"█ compute +forwards and backwards of layers", shown)
    assert re.search(r"  step +.* 100.0%", shown)
    bar = next(line for line in shown.splitlines() if re.fullmatch("█+·+", line))
    numbers = json.loads(explained(str(path), "--json"))
    most = max(numbers["ranks"], key=lambda parts: parts["compute"])
    assert bar.count("█") / len(bar) == pytest.approx(
        most["compute"] / numbers["step_seconds"], abs=0.01
    )
    for parts in numbers["ranks"]:
        assert sum(parts.values()) == pytest.approx(numbers["step_seconds"])


@pytest.mark.parametrize("seed", [4, 6, 7])
def test_idle_time_that_is_only_rounding_has_no_sign(seed, tmp_path):
    """The rank that works most had a bubble of -0.0%."""
    dice = random.Random(seed)

    def with_seconds_of_its_own(layer):
        names = ("forward_seconds", "backward_input_seconds", "backward_weight_seconds")
        return replace(layer, **{name: 0.01 * (1 + dice.random()) for name in names})

    even = chain(dice.randint(2, 4))
    graph = replace(even, layers=tuple(map(with_seconds_of_its_own, even.layers)))
    count = len(graph.layers)
    plan = find_plan(graph, devices(count), microbatches=4, schedule="pipedream", stages=count)
    plan.save(tmp_path / "plan.json")
    (idle,) = re.findall(r"^· bubble .*$", run("explain", tmp_path / "plan.json"), re.M)
    assert re.search(r" 0\.0% +\d+\.\d%$", idle)
