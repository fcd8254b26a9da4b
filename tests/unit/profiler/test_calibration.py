"""Profiles: how much longer ranks of one machine take than their layers alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.base.errors import InputError
from penstock.core.graph import Contention
from penstock.training.profiler.alone import Alone
from penstock.training.profiler.calibrating import CalibrationRound, Judgement
from penstock.training.profiler.disturbance import Usage, share_of_others
from penstock.training.profiler.runs import (
    FAMILIES,
    Factors,
    Lap,
    Ran,
    factors_of,
    paced,
    plan_of,
)
from tests.kit.planning import chain, devices

factors = st.floats(0.5, 5)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def squared(output, targets):
    return nn.functional.mse_loss(output, targets)


@pytest.fixture
def undisturbed(monkeypatch):
    """However busy the machine is that runs the tests, what these measure is not about that."""
    monkeypatch.setattr("penstock.training.profiler.calibrating.QUIET_SHARE", 1.0)
    monkeypatch.setattr("penstock.training.profiler.calibrating.SLOWER_REFERENCE", 1e9)


def alone_of(graph, times=1.0):
    """What a machine that is so many times slower than the profile says would take alone."""
    forward = times * sum(layer.forward_seconds for layer in graph.layers)
    backward = times * sum(layer.backward_seconds for layer in graph.layers)
    return Alone(forward, backward, forward + backward)


@settings(max_examples=8)
@given(passes=factors, updates=factors, slower=st.floats(0.5, 3), mode=st.sampled_from([*FAMILIES]))
def test_the_planner_says_what_a_machine_took_on_which_the_profile_was_made(
    passes, updates, slower, mode
):
    """Ranks that are slower by a known factor are recognised, whatever it is, and however much
    slower than the profile the machine has become since for everybody."""
    graph = chain(6, split_forward_seconds=0.002, split_seconds=0.001, update_seconds=0.01)
    graph = replace(graph, op_seconds=0.0005)
    names = {"whole": "update", "split": "update", "stream": "stream_update"}
    machine = Contention(**{mode: passes, names[mode]: updates})
    crowd = replace(devices(2), memory_bytes=10**12)
    now = paced(graph, alone_of(graph, slower))
    truth = pk.plan(
        replace(now, contention=machine), crowd, microbatches=8, schedule=FAMILIES[mode],
        stages=2, cuts=[3],
    )  # fmt: skip
    ran = Ran(truth.step_seconds, sum(stage.update_seconds for stage in truth.stages), 0.0)
    lap = Lap(alone_of(graph, slower), ran)
    found = factors_of(graph, plan_of(graph, mode, 2), lap)
    assert found.passes == pytest.approx(passes, rel=0.01)
    assert found.updates == pytest.approx(updates, rel=0.01)


def test_ranks_of_a_host_that_does_not_tell_its_memory_crowd_each_other_too(monkeypatch):
    monkeypatch.setattr("penstock.core.cluster.local.host_memory_bytes", lambda: 0)
    graph = chain(4)
    made = plan_of(graph, "whole", 2)
    ran = Ran(2 * made.step_seconds, 0.0, 0.0)
    assert factors_of(graph, made, Lap(alone_of(graph), ran)).passes > 1.8


class Crowded(nn.Linear):
    """Takes twice as long while another is under way."""

    inside: ClassVar[list[int]] = []

    def forward(self, value):
        self.inside.append(1)
        time.sleep(0.002 * len(self.inside))
        self.inside.pop()
        return super().forward(value)


@pytest.mark.usefixtures("undisturbed")
def test_real_ranks_tell_what_they_cost_each_other():
    model = nn.Sequential(*(Crowded(4, 4) for _ in range(4)))
    before = [parameter.clone() for parameter in model.parameters()]
    told, num_threads = [], threading.active_count()
    graph = pk.profile(
        model, torch.randn(2, 4), loss=squared, targets=torch.randn(2, 4), optimizer=sgd,
        repeats=3, ranks=2, patience_seconds=0.1,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    found = graph.contention
    assert min(found.whole, found.split, found.stream) > 1.2
    assert found.update > 0 and found.stream_update > 0
    assert (found.num_ranks, found.num_rejected) == (2, 0) and found.num_rounds >= 2
    assert "was not measured" not in "".join(graph.warnings)
    # The model has learnt nothing from it, and people have seen how far it was.
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[-1] and len({*totals}) == 1
    assert threading.active_count() == num_threads


class Shy(nn.Linear):
    """Works in the thread that profiles, and in no other."""

    def forward(self, value):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("not here")
        return super().forward(value)


class Single(nn.Linear):
    """Cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("one is enough")


def trained(*layers):
    return pk.profile(
        nn.Sequential(*layers), torch.randn(2, 4), loss=squared, targets=torch.randn(2, 4),
        optimizer=sgd, repeats=1, ranks=2, patience_seconds=0.1,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "why"), [(Shy, "not here"), (Single, "one is enough")])
def test_what_could_not_be_run_is_said(kind, why):
    graph = trained(nn.Linear(4, 4), kind(4, 4))
    warnings = " ".join(graph.warnings)
    assert "was not measured" in warnings and why in warnings
    assert graph.contention == Contention()


def test_what_cannot_run_without_a_flush_is_measured_with_one():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    graph = trained(first, second)
    assert "contention of pipedream was not measured" in " ".join(graph.warnings)
    assert graph.contention.stream == graph.contention.whole != 1


def test_without_memory_for_copies_nothing_is_run(monkeypatch):
    monkeypatch.setattr("penstock.training.profiler.runs.host_memory_bytes", lambda: 100)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph = pk.profile(model, torch.randn(2, 4), repeats=1, ranks=2)
    assert "a copy of the model with its versions may need" in graph.warnings[-1]


@pytest.mark.parametrize("ranks", [0, 1])
def test_one_rank_has_no_neighbours(ranks):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph = pk.profile(model, torch.randn(2, 4), repeats=1, ranks=ranks, sizes=[1])
    assert graph.contention == graph.at(1).contention == Contention()


def test_without_a_loss_or_an_optimizer_passes_are_compared_all_the_same():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = pk.profile(
        model, torch.randn(2, 4), repeats=1, ranks=2, sizes=[1], patience_seconds=0.1
    )
    assert found.contention.stream == found.contention.whole != 1
    assert found.contention.update == found.contention.stream_update == 1
    assert found.at(1).contention == found.contention


def test_factors_are_positive():
    with pytest.raises(InputError, match="contention: split is 0"):
        Contention(split=0)


def test_each_kind_of_schedule_has_its_factors():
    graph = replace(
        chain(4, update_seconds=0.01, split_forward_seconds=0.003),
        contention=Contention(whole=2, split=3, stream=4, update=5, stream_update=6),
    )
    crowd = replace(devices(2), memory_bytes=10**12)
    asked = {"microbatches": 4, "stages": 2}

    def first(cluster, family):
        stage = pk.plan(graph, cluster, schedule=family, **asked).stages[0]
        return pytest.approx((stage.forward_seconds, stage.update_seconds))

    assert first(crowd, "1f1b") == (2 * 0.02, 5 * 0.02)
    assert first(crowd, "zb-h1") == (3 * (0.02 + 0.006), 5 * 0.02)
    assert first(crowd, "pipedream") == (4 * 0.02, 6 * 0.02)
    # Machines of their own do not disturb each other.
    assert first(devices(2), "zb-h1") == (0.02 + 0.006, 0.02)


class Caching(nn.Linear):
    """Keeps what it gave, of which no copy can be made."""

    def forward(self, value):
        self.given = super().forward(value)
        return self.given


def test_what_measuring_leaves_on_a_model_is_in_nobodys_way():
    graph = trained(Caching(4, 4), Caching(4, 4))
    assert graph.contention.num_ranks == 2
    assert "was not measured" not in "".join(graph.warnings)


def test_an_optimizer_of_other_parameters_is_refused_before_it_trains_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [parameter.clone() for parameter in model.parameters()]
    batch = {"loss": squared, "targets": torch.randn(2, 4)}

    def of_the_model(_):
        return torch.optim.SGD(model.parameters(), lr=1)

    with pytest.raises(InputError, match="has parameters that its function was not given"):
        pk.profile(model, torch.randn(2, 4), optimizer=of_the_model, repeats=1, **batch)
    assert all(map(torch.equal, before, model.parameters()))
    graph = pk.profile(model, torch.randn(2, 4), repeats=1, ranks=0, **batch)
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=2, schedule="1f1b", stages=2)
    with pytest.raises(InputError, match="has parameters that its function was not given"):
        pk.Pipeline(model, plan, loss=squared, optimizer=of_the_model)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.LBFGS, "LBFGS calls the loss several times"),
        (lambda parameters: None, "what the optimizer function made"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1), r"is made already \(SGD\)"),
        (lambda parameters: 1 / 0, "the optimizer of the layer of 0.weight cannot be made: Zero"),
    ],
)
def test_what_makes_no_optimizer_is_refused(optimizer, message):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InputError, match=message):
        pk.profile(model, torch.randn(2, 4), optimizer=optimizer, repeats=1, ranks=0)


def test_a_layer_may_have_nothing_that_an_optimizer_wants():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    names = []

    def of_matrices(parameters):
        names.extend(name for name, _ in parameters.named())
        return torch.optim.SGD([one for one in parameters if one.dim() > 1], lr=0.1)

    graph = pk.profile(model, torch.randn(2, 4), optimizer=of_matrices, repeats=1, ranks=0)
    first, second = graph.layers
    assert first.update_seconds > 0 == second.update_seconds
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


class Slowing(nn.Linear):
    """Takes a millisecond; a copy, eight times as long."""

    pause = 0.001

    def __deepcopy__(self, memo):
        slower = type(self)(self.in_features, self.out_features)
        slower.pause = 8 * self.pause
        return slower

    def forward(self, value):
        time.sleep(self.pause)
        return super().forward(value)


@pytest.mark.usefixtures("undisturbed")
def test_a_machine_that_is_slower_now_than_before_is_no_contention():
    """Pipelines run in turns with layers alone, so both have seen the same machine, and the
    profile's seconds follow it."""
    graph = trained(*(Slowing(4, 4) for _ in range(4)))
    assert graph.contention.whole < 3
    assert sum(layer.forward_seconds for layer in graph.layers) > 4 * 0.008


class Logging(nn.Linear):
    """Notes who runs it."""

    log: ClassVar[list[bool]] = []

    def forward(self, value):
        self.log.append(threading.current_thread() is threading.main_thread())
        return super().forward(value)


def test_layers_alone_and_pipelines_take_turns():
    Logging.log.clear()
    trained(Logging(4, 4), Logging(4, 4))
    turns = [is_alone for is_alone, _ in itertools.groupby(Logging.log)]
    # Two rounds at least, each with three pipelines between layers alone.
    assert len(turns) >= 2 * 3 * 2 + 1 and turns[0] and turns[-1]


def rounds_of(*passes, others=0.0, reference=1.0, by_cpu=1.1):
    return [
        CalibrationRound(
            {"whole": Factors(factor, 1.2, by_cpu)}, Alone(1.0, 2.0, 1.5), others, reference
        )
        for factor in passes
    ]


def test_disturbed_rounds_do_not_count():
    quiet = rounds_of(1.1, 1.1, 1.12)
    busy = [*rounds_of(2.0, others=0.4), *rounds_of(1.8, reference=1.5)]
    found = Judgement([*busy, *quiet], 2)
    assert found.is_enough and not [*found.warnings()]
    contention = found.contention
    assert contention.whole == contention.split == contention.stream == 1.1
    assert contention.update == 1.2
    assert (contention.num_rounds, contention.num_rejected) == (3, 2)
    assert found.alone == Alone(1.0, 2.0, 1.5)


def test_figures_that_differ_are_measured_again_and_told():
    throws = rounds_of(1.04, 1.36, 1.2, 1.1)
    found = Judgement(throws, 2)
    assert not found.is_enough
    (warning,) = found.warnings()
    assert "not steady: 1.15 ± " in warning and "--patience" in warning
    assert found.contention.whole_spread > 0.04
    # More of the same make the median surer.
    assert Judgement(throws * 20, 2).is_enough


def test_on_a_busy_machine_processor_time_stands_for_time():
    found = Judgement([*rounds_of(2.2, 2.1, 1.9, others=0.5), *rounds_of(1.9)], 2)
    assert not found.is_enough
    contention = found.contention
    assert (contention.whole, contention.update) == (1.1, 1.0)
    assert (contention.num_rounds, contention.num_rejected) == (0, 4)
    # Interruptions while layers worked alone do not count either.
    assert found.alone.forward_seconds == pytest.approx(0.5)
    (warning,) = found.warnings()
    assert "busy: other programs had 50% of its cores" in warning


def test_others_are_all_but_this_process():
    before = Usage(0.0, 100.0, 5.0, 2)
    assert share_of_others(before, Usage(10.0, 115.0, 10.0, 2)) == pytest.approx(0.5, rel=0.01)
    assert share_of_others(before, Usage(10.0, 110.0, 15.0, 2)) == 0
    assert share_of_others(before._replace(busy_seconds=None), before) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others are seen on Linux only")
def test_another_program_is_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        before = Usage.now()
        time.sleep(1.0)
        after = Usage.now()
        other.kill()
    # On a machine with more to do, others have even more of it.
    assert share_of_others(before, after) * after.num_cores > 0.3


@pytest.mark.parametrize("patience", [0, -1, "long", float("nan")])
def test_patience_is_a_number_of_seconds(patience):
    with pytest.raises(InputError, match="patience_seconds is"):
        pk.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), patience_seconds=patience)


def test_what_was_measured_is_kept_and_told(tmp_path):
    contention = Contention(
        whole=1.04, whole_spread=0.012, num_ranks=2, num_rounds=5, num_rejected=2, others_share=0.03
    )
    graph = replace(chain(2), contention=contention, warnings=("something is odd",))
    graph.save(tmp_path / "graph.json")
    assert pk.LayerGraph.load(tmp_path / "graph.json") == graph
    told = str(graph)
    assert "passes take 1.04 ± 1.2% times as long" in told and "! something is odd" in told
    assert "(5 rounds, 2 rejected; others had 3% of its cores)" in told
