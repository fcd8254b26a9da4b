"""Profiles: how much longer ranks of one machine take than their layers alone."""

from __future__ import annotations

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
from penstock.calibration.fit import _disagreements, _fitted
from penstock.calibration.runs import FAMILIES, Run
from penstock.errors import InputError
from penstock.graph import Contention
from tests.planning import chain, devices

factors = st.floats(0.5, 5)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def squared(output, targets):
    return nn.functional.mse_loss(output, targets)


@settings(max_examples=15)
@given(
    passes=st.fixed_dictionaries(dict.fromkeys(FAMILIES, factors)),
    updates=factors,
    stream_updates=factors,
)
def test_the_planner_says_what_a_machine_took_on_which_the_profile_was_made(
    passes, updates, stream_updates
):
    """A machine that is slower by known factors is recognised, whatever they are."""
    graph = chain(6, split_forward_seconds=0.002, split_seconds=0.001, update_seconds=0.01)
    graph = replace(graph, op_seconds=0.0005)
    machine = Contention(**passes, update=updates, stream_update=stream_updates)
    crowd = replace(devices(2), memory_bytes=10**12)
    runs = {}
    for mode, family in FAMILIES.items():
        asked = {"microbatches": 8, "schedule": family, "stages": 2}
        run = runs[mode] = Run(pk.plan(graph, crowd, **asked))
        truth = pk.plan(replace(graph, contention=machine), crowd, **asked)
        run.rounds = [[truth.step_seconds] * 3]
        run.updates = {index: [stage.update_seconds] for index, stage in enumerate(truth.stages)}
    found = _fitted(graph, runs, 2)
    assert found.num_ranks == 2
    for name in (*FAMILIES, "update", "stream_update"):
        assert getattr(found, name) == pytest.approx(getattr(machine, name), rel=0.01)


class Crowded(nn.Linear):
    """Takes twice as long while another is under way."""

    inside: ClassVar[list[int]] = []

    def forward(self, value):
        self.inside.append(1)
        time.sleep(0.002 * len(self.inside))
        self.inside.pop()
        return super().forward(value)


def test_real_ranks_tell_what_they_cost_each_other():
    model = nn.Sequential(*(Crowded(4, 4) for _ in range(4)))
    before = [parameter.clone() for parameter in model.parameters()]
    told = []
    graph = pk.profile(
        model, torch.randn(2, 4), loss=squared, targets=torch.randn(2, 4), optimizer=sgd,
        repeats=3, ranks=2, progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    found = graph.contention
    assert min(found.whole, found.split, found.stream) > 1.2
    assert found.update > 0 and found.stream_update > 0
    assert "was not measured" not in "".join(graph.layers[0].warnings)
    # The model has learnt nothing from it, and everybody has heard of every run.
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    total = told[-1][1]
    assert list(dict.fromkeys(told)) == [(done, total) for done in range(1, total + 1)]
    assert threading.active_count() == 1


class Alone(nn.Linear):
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
        optimizer=sgd, repeats=1, ranks=2,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "why"), [(Alone, "not here"), (Single, "one is enough")])
def test_what_could_not_be_run_is_said(kind, why):
    graph = trained(nn.Linear(4, 4), kind(4, 4))
    warnings = " ".join(graph.layers[0].warnings)
    assert "was not measured" in warnings and why in warnings
    assert graph.contention == Contention()


def test_what_cannot_run_without_a_flush_is_measured_with_one():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    graph = trained(first, second)
    assert "contention of pipedream was not measured" in " ".join(graph.layers[0].warnings)
    assert graph.contention.stream == graph.contention.whole != 1


def test_without_memory_for_copies_nothing_is_run(monkeypatch):
    monkeypatch.setattr("penstock.calibration.runs.host_memory_bytes", lambda: 100)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph = pk.profile(model, torch.randn(2, 4), repeats=1, ranks=2)
    assert "a copy of the model with its versions may need" in graph.layers[0].warnings[-1]


@pytest.mark.parametrize("ranks", [0, 1])
def test_one_rank_has_no_neighbours(ranks):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph = pk.profile(model, torch.randn(2, 4), repeats=1, ranks=ranks, sizes=[1])
    assert graph.contention == graph.at(1).contention == Contention()


def test_without_a_loss_or_an_optimizer_passes_are_compared_all_the_same():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = pk.profile(model, torch.randn(2, 4), repeats=1, ranks=2, sizes=[1])
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
    assert "was not measured" not in "".join(graph.layers[0].warnings)


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
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1), "cannot be made: TypeError"),
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


def test_runs_that_disagree_make_a_warning():
    plan = pk.plan(chain(4), devices(2), microbatches=4, schedule="1f1b", stages=2)
    alike, apart = Run(plan, rounds=[[1.0], [1.2]]), Run(plan, rounds=[[1.0], [1.5]])
    assert not [*_disagreements({"whole": alike})]
    (warning,) = _disagreements({"whole": alike, "split": apart})
    assert "zb-h1: one of its runs took 50% longer" in warning
