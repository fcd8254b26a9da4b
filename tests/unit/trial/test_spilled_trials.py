"""Trials and proofs of plans whose stages come and go, and what cannot be done with them."""

from __future__ import annotations

import pytest

import penstock as pk
from penstock.base.errors import InputError
from penstock.trial import prove, run_trial
from tests.kit.helpers import make_mlp
from tests.kit.small_workload import workload
from tests.kit.spilling import spilled_plan


@pytest.mark.parametrize("resume", [False, True])
def test_a_proof_finds_the_bits_of_one_device(resume):
    proof = prove(workload(), spilled_plan(make_mlp()), 4, resume=resume)
    assert proof.equal and proof.exact, str(proof)


def test_a_trial_compares_weights_that_have_come_back():
    trial = run_trial(workload(), spilled_plan(make_mlp()), 3)
    assert trial.largest_parameter_difference == 0.0


def test_a_rehearsal_has_no_tier():
    with pytest.raises(InputError, match="take spill out of the plan"):
        pk.rehearse(spilled_plan(make_mlp()))
