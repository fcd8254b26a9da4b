"""A proof says that a plan is right, and where it is not."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

from penstock import versions
from penstock.base.errors import InputError, ModelError
from penstock.trial import Workload, proof, prove, steps_needed, verdict
from penstock.trial.reference.delayed_replay import DelayedReplay
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import crossed
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.reducing import replicated
from tests.kit.small_workload import workload
from tests.kit.streams import plan_for
from tests.numerics.test_one_logical_model_shared import TiedGPT, token_batch

STREAMS = {
    "latest": versions.Latest(),
    "stash": versions.Stash(),
    "stash per minibatch": versions.Stash(updates="minibatch"),
    "vertical sync": versions.VerticalSync(),
    "2bw": versions.DoubleBuffer(),
    "pipemare": versions.PipeMare(t1=6, t3=2),
    "pipemare t2": versions.PipeMare(t2=0.3, updates="microbatch"),
    "predict": versions.Predict(rule="spectrain"),
}


def stream(policy="stash", microbatches=2, **how):
    how = how or {"num_stages": 3}
    return plan_for(
        STREAMS[policy], how.pop("num_stages", None), microbatches=microbatches, model=make_mlp(),
        **how,
    )  # fmt: skip


def tied(*rates):
    """A workload with weights that two stages share; each optimizer gets the next of some rates."""
    given = itertools.chain(rates, itertools.repeat(rates[-1]))
    return Workload(
        lambda: TiedGPT().float(),
        F_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=next(given)),
        lambda: (token_batch(8, seed) for seed in range(9)),
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe", "interleaved-1f1b"])
def test_a_synchronous_plan_is_proven_to_the_bit(schedule):
    found = prove(workload(), make_plan(make_mlp(), 2, 4, schedule))
    assert found.equal and found.exact
    assert found.expected == "equal to the bit"
    assert len(found.losses) == 5
    assert sum(len(row.differences) for row in found.rows) == 6
    assert all(row.recorded_delay is None and row.held == () for row in found.rows)
    assert found.verdict.startswith("Proven:") and "one device" in found.verdict


@pytest.mark.parametrize(
    ("policy", "microbatches"), crossed(STREAMS, (4, 2), thorough=("stash", "2bw"))
)
def test_an_asynchronous_plan_is_proven_with_its_delays_and_versions(policy, microbatches):
    plan = stream(policy, microbatches)
    for num_steps in (None, steps_needed(plan)):
        found = prove(workload(), plan, num_steps)
        assert found.equal, found.verdict
        assert found.exact or found.expected.startswith("equal up to rounding")
        for stage, row in enumerate(found.rows):
            place = plan.place(stage)
            assert row.recorded_delay == pytest.approx(plan.versions.delay(place))
            assert set(row.held) == {plan.versions.versions_held(place)}
    assert found.exact or policy in ("pipemare t2", "predict")


def test_replicas_are_proven():
    found = prove(workload(), stream(replicas="2-1"))
    assert found.equal
    assert found.exact and found.expected == "equal to the bit"
    assert [row.held for row in found.rows] == [(2, 2), (1,)]
    assert found.rows[0].recorded_delay == 1


def test_chimera_adds_both_ways_in_the_order_of_the_ranks():
    assert prove(workload(), make_plan(make_mlp(), 2, 4, "chimera")).exact


def test_a_proof_in_another_order_than_the_plan_s_fails():
    """The reference does replay the tree: with the order of the ranks, bits differ."""
    plan = replicated(make_mlp(), (4,))
    near = replace(plan, summing=replace(plan.summing, levels=((0, 0, 1, 1),)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "_copied", lambda _, twin, copied=proof._copied: copied(plan, twin))
        assert not prove(workload(), near).equal


@pytest.mark.parametrize("float64", [False, True])
def test_another_order_of_sums_is_allowed_and_nothing_else(float64):
    plan = make_plan(TiedGPT().float(), 2, 4)
    found = prove(tied(0.1), plan, float64=float64)
    assert found.equal and not found.exact
    assert "up to rounding" in found.verdict
    assert max(one.ulps for row in found.rows for one in row.differences) < 100
    # The first two optimizers are the pipeline's, one per stage; the last is the device's.
    right = 0.1
    wrong = right * (1 + (1e-6 if float64 else 1e-2))
    found = prove(tied(right, right, wrong), plan, float64=float64)
    assert not found.equal
    assert found.rows[0].differences[0].share == pytest.approx(wrong / right - 1, rel=0.2)
    assert ("train in float64" in found.verdict) is not float64


@pytest.mark.parametrize(
    ("replicas", "levels"),
    [((4,), ()), ((4,), ((0, 0, 1, 1),)), ((1, 3), ((0, 1, 0, 1),)), ((3, 1), ((0, 1, 1, 1),))],
)
@pytest.mark.parametrize("reducer", ["owners", "parameter-server", "fully-sharded"])
def test_copies_are_proven_to_the_bit_in_the_order_of_the_plan(replicas, levels, reducer):
    plan = replicated(make_mlp(), replicas)
    plan = replace(plan, summing=replace(plan.summing, levels=levels)).with_reducer(reducer)
    found = prove(workload(), plan)
    assert found.exact and found.expected == "equal to the bit", found.verdict


def test_tied_weights_are_proven_up_to_rounding():
    found = prove(tied(0.1), make_plan(TiedGPT().float(), 2, 4), 3)
    assert found.equal
    assert (
        found.expected
        == "equal up to rounding, because layers share weights, whose gradients are added"
    )


def F_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def test_optimizers_that_ask_for_names_and_slices_with_dropout():
    named = dataclasses.replace(
        workload(),
        optimizer=lambda parameters: torch.optim.SGD(
            [one for _, one in parameters.named()], lr=0.1
        ),
    )
    assert prove(named, make_plan(make_mlp(), 2, 4), 2).exact
    plan = replace(make_plan(make_mlp(), 2, 4, "seq1f1b"), options={"num_slices": 2})
    with pytest.raises(InputError, match="dropout draws for each slice"):
        prove(workload(), plan)


def test_a_replay_of_other_versions_is_not_equal(monkeypatch):
    def latest(model, cuts, policy, *args, **kwargs):
        return DelayedReplay(model, cuts, versions.Latest(), *args, **kwargs)

    monkeypatch.setattr(proof, "DelayedReplay", latest)
    found = prove(workload(), stream())
    assert not found.equal
    # Forwards read the same under both, so delays agree; backwards do not.
    assert "parameters and buffers differ, first '0.weight' of stage 0" in found.verdict
    assert "the loss of minibatch" in found.verdict and "versions" not in found.verdict
    assert found.rows[0].largest.share > 1e-3


def test_a_replay_of_other_delays_is_not_equal(monkeypatch):
    def sync(model, cuts, policy, *args, **kwargs):
        return DelayedReplay(model, cuts, versions.VerticalSync(), *args, **kwargs)

    monkeypatch.setattr(proof, "DelayedReplay", sync)
    found = prove(workload(), stream())
    # The first stage has the same delay under both; vertical sync gives it to the others, too.
    assert {stage for stage, _ in found.misread} == {1, 2}
    assert "stage 1 is the first with another delay, at microbatch 2" in found.verdict


def test_a_change_in_the_last_place_is_found_where_it_is(monkeypatch):
    class Nudged(SingleDevice):
        def __init__(self, model, *args, **kwargs):
            super().__init__(model, *args, **kwargs)
            self.bias = model[5].bias

        def step(self, *batch):
            loss = super().step(*batch)
            with torch.no_grad():
                worst = self.bias.abs().argmax()
                self.bias[worst] = self.bias[worst].nextafter(torch.tensor(9.0))
            return loss

    monkeypatch.setattr(proof, "SingleDevice", Nudged)
    found = prove(workload(), make_plan(make_mlp(), 2, 4), 1)
    assert found.faults == (found.faults[0],)
    assert "1 of 6 parameters and buffers differ, first '5.bias' of stage 1" in found.verdict
    assert 0.4 <= found.rows[1].largest.ulps <= 1
    assert found.rows[0].largest.absolute == 0


def test_another_optimizer_is_not_equal():
    given = itertools.chain([0.1, 0.1], itertools.repeat(0.2))
    wrong = dataclasses.replace(
        workload(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=next(given))
    )
    found = prove(wrong, make_plan(make_mlp(), 2, 4))
    assert found.verdict.startswith("NOT equal: the loss of minibatch 1 is the first that differs")
    assert found.numbers()["equal"] is False


def test_versions_and_delays_other_than_the_formulas_are_said(monkeypatch):
    monkeypatch.setattr(versions.Stash, "versions_held", lambda self, place: place.warm_up + 2)
    found = prove(workload(), stream())
    assert found.exact and not found.equal
    assert "stage 0 has a delay of 2 and holds 3 versions, but the formulas say 2 and 4" in (
        found.verdict
    )
    late = dataclasses.replace(found.rows[0], recorded_delay=5.0, versions=3)
    assert not late.as_planned
    assert dataclasses.replace(late, recorded_delay=2.0).as_planned


def test_differences_are_measured_as_they_are_said_to_be():
    before, theirs = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 4.0])
    ours = torch.tensor([3.5, 4.0])
    found = verdict._difference("w", ours, theirs, before, rounds=True)
    assert (found.absolute, found.share, found.allowed) == (0.5, 0.25, False)
    assert found.ulps == 0.5 / (4 * torch.finfo(torch.float32).eps)
    assert verdict._difference("w", theirs + 1e-6, theirs, before, rounds=True).allowed
    assert not verdict._difference("w", theirs + 1e-6, theirs, before, rounds=False).allowed
    odd = torch.tensor([torch.nan, torch.inf])
    assert verdict._difference("w", odd, odd.clone(), before, rounds=False).allowed
    # In float32, √ε of the way of 2 is 7e-4.
    assert verdict._difference("w", theirs + 5e-4, theirs, before, rounds=True).allowed
    assert not verdict._difference("w", theirs + 9e-4, theirs, before, rounds=True).allowed
    gone = verdict._difference("w", odd, theirs, before, rounds=True)
    assert gone.absolute == torch.inf and not gone.allowed
    count = torch.tensor([3])
    assert not verdict._difference("n", count + 1, count, count - 1, rounds=True).allowed


def test_models_that_begin_different_are_refused():
    seeds = itertools.count()
    unseeded = dataclasses.replace(workload(), build_model=lambda: make_mlp(seed=next(seeds)))
    with pytest.raises(InputError, match=r"first '0\.weight' of stage 0"):
        prove(unseeded, make_plan(make_mlp(), 2, 4))


def test_what_cannot_be_proven_is_refused(monkeypatch):
    few = dataclasses.replace(workload(), batches=lambda: iter([make_batch(8)] * 2))
    with pytest.raises(InputError, match="only 2 minibatches, but 5"):
        prove(few, make_plan(make_mlp(), 2, 4))
    with pytest.raises(
        InputError, match=r"1 minibatches do not reach the steady state.* 2 or more"
    ):
        prove(workload(), stream(), 1)
    short = dataclasses.replace(workload(), batches=lambda: iter([make_batch(1)] * 9))
    with pytest.raises(InputError, match="minibatch 0 has 1 rows, fewer than the plan's 2"):
        prove(short, stream())
    with pytest.raises(ModelError, match="another model"):
        prove(workload(), make_plan(make_mlp(dtype=torch.float64), 2, 4))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="one of 4 processes"):
        prove(workload(), make_plan(make_mlp(), 2, 4))


def ragged(*sizes):
    return dataclasses.replace(workload(), batches=lambda: map(make_batch, sizes))


@pytest.mark.parametrize("policy", ["stash", "stash per minibatch", "2bw"])
def test_a_last_minibatch_with_few_rows_is_no_obstacle(policy):
    data = ragged(8, 8, 8, 8, 1)
    found = prove(data, stream(policy, 4))
    assert found.equal, found.verdict
    assert prove(data, make_plan(make_mlp(), 2, 4)).exact


def test_a_short_minibatch_between_others_is_one_where_each_is_an_update():
    data = ragged(8, 8, 8, 1, 8)
    assert prove(data, stream("stash", 4)).equal
    assert prove(data, make_plan(make_mlp(), 2, 4)).exact
    for policy in ("stash per minibatch", "2bw"):
        with pytest.raises(InputError, match="minibatch 3 has 1 rows, fewer than the plan's 4"):
            prove(data, stream(policy, 4))
    with pytest.raises(InputError, match="minibatch 2 has 1 rows"):
        prove(ragged(8, 8, 1, 8, 8), stream("pipemare", 4))


def test_stages_without_weights_and_progress():
    told = []
    plan = make_plan(make_mlp(), 3, 4, cuts=[1, 3])  # the second stage: ReLU and dropout
    found = prove(workload(), plan, 2, lambda *done: told.append(done))
    assert told[0] == (1, 4) and told[-1] == (4, 4)
    assert found.rows[1].largest is None and "no weights" in found.text()


def test_the_text_is_a_table_that_ends_in_the_verdict():
    found = prove(workload(), stream())
    lines = found.text().splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert lines[3].split() == ["stage", "layers", "delay", "recorded", "versions", "held",
                                "difference"]  # fmt: skip
    assert lines[4].split()[-8:] == ["2", "2", "3", "3", "0,", "to", "the", "bit"]
    assert " ".join(found.text().split()).endswith(found.verdict)


def test_a_mesh_is_proven_up_to_rounding():
    plan = make_plan(make_mlp(), 2, 4).with_tensor_split(2, {"0": "column", "1": "any", "3": "row"})
    found = prove(workload(), plan, float64=True)
    assert found.equal and not found.exact
    assert "tensor ranks add what each of them has" in found.expected
