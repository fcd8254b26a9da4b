"""All methods on one workload, in turns: who is fastest, smallest, soonest, and what that costs.

``methods`` is what there is to compare and on what, ``entrants`` a method that trains, in threads
or in processes, ``contest`` the turns, ``judging`` the figures.

Decisions:

Every method trains on the same minibatches from the same weights, a turn at a time, one method
after another, so that a noisy machine is noisy for all. Each turn begins with another method. A
step's time is the median; what is drawn over time takes that median for every step, so that one
interruption bends no curve.

One update per minibatch, whatever the method: asynchronous ones that update after every unit of
their pipeline get whole minibatches as units, as they were published. So equal updates are equal
data.

Stages begin with the same layers, whatever the schedule (but for those with several stages per
device), so that what differs is the schedule.

What should compute what one device computes is held to it: a synchronous method whose losses
differ by more than rounding is stopped, and its row says so.
"""

from penstock.trial.contest.contest import ContestStep, run_contest
from penstock.trial.contest.methods import METHODS, ContestSetting, Method, Stage, chosen_methods

__all__ = [
    "METHODS",
    "ContestSetting",
    "ContestStep",
    "Method",
    "Stage",
    "chosen_methods",
    "run_contest",
]
