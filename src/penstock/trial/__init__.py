"""A training run beside its single-device twins: is it the same, is it faster, was it predicted?"""

from penstock.trial.curvature import largest_curvature, stage_curvatures
from penstock.trial.proof import prove, steps_needed
from penstock.trial.result import Trial
from penstock.trial.trial import ContestProgress, run_trial
from penstock.trial.verdict import Difference, Proof, ProofRow
from penstock.trial.workload import Contestant, Workload, on_one_device, pipelined

__all__ = [
    "ContestProgress",
    "Contestant",
    "Difference",
    "Proof",
    "ProofRow",
    "Trial",
    "Workload",
    "largest_curvature",
    "on_one_device",
    "pipelined",
    "prove",
    "run_trial",
    "stage_curvatures",
    "steps_needed",
]
