"""A training run beside its single-device twins: is it the same, is it faster, was it predicted?"""

from penstock.trial.contestants import Contestant, on_one_device, pipelined
from penstock.trial.result import Trial
from penstock.trial.trial import Progress, run_trial
from penstock.trial.workload import Workload

__all__ = [
    "Contestant",
    "Progress",
    "Trial",
    "Workload",
    "on_one_device",
    "pipelined",
    "run_trial",
]
