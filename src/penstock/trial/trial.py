"""Run contestants side by side, in turns, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from penstock.base.errors import InputError
from penstock.planning.plans import Plan
from penstock.trial.result import Trial
from penstock.trial.workload import Batch, Contestant, Workload, on_one_device, pipelined

ContestProgress = Callable[[Contestant], None]
"""Called after every step of every contestant."""

_TURN = 5


def run_trial(
    workload: Workload,
    plan: Plan,
    num_steps: int,
    *,
    compare: bool = True,
    evaluate_every: int = 10,
    progress: ContestProgress | None = None,
) -> Trial:
    """Train through the pipeline and, if asked to ``compare``, on one device beside it.

    The twin with one thread trains exactly the same steps and is the one to be equal to. Those
    with two threads (same microbatches; whole batch at once) are there to be honest about speed and
    train every other turn. A pipeline that never flushes drains at the end of every turn of five
    minibatches all the same, so that all take turns on an equally noisy machine. The pipeline is
    evaluated after its first and its last step, too.

    Args:
        plan: made for its model.
        num_steps: minibatches, at least 1.
        compare: train the single-device twins too.
        evaluate_every: steps between evaluations on the held-out data.
        progress: called after every step.

    Raises:
        InputError: ``num_steps`` or ``evaluate_every`` is below 1, or the batches run out before
            the first step.
        RunError: a step failed.
    """
    if num_steps < 1 or evaluate_every < 1:
        raise InputError(
            f"steps ({num_steps}) and steps between evaluations ({evaluate_every}) must be ≥ 1"
        )
    pipeline = pipelined(workload, plan)
    twins = _twins(workload, plan) if compare else []
    batches = workload.batches()
    try:
        turn = 0
        while turns := list(islice(batches, min(_TURN, num_steps - len(pipeline.losses)))):
            for contestant in [pipeline, *(twins if turn % 2 == 0 else twins[:1])]:
                with contestant.taking_turn():
                    _take_turn(contestant, turns, evaluate_every, progress)
            turn += 1
        _evaluate_at_the_end(pipeline)
    finally:
        pipeline.close()
    if not pipeline.losses:
        raise InputError(f"the workload {workload.name} yields no minibatch")
    return Trial(workload, plan, pipeline, tuple(twins))


def _evaluate_at_the_end(pipeline: Contestant) -> None:
    """The held-out loss of the trained model, unless the last step was one to evaluate after."""
    if pipeline.held_out and pipeline.held_out[-1][0] < len(pipeline.losses):
        pipeline.held_out_loss()


def _twins(workload: Workload, plan: Plan) -> list[Contestant]:
    count = plan.num_microbatches
    return [
        on_one_device(workload, count, num_threads=1),
        on_one_device(workload, count, num_threads=2),
        on_one_device(workload, 1, num_threads=2),
    ]


def _take_turn(
    contestant: Contestant,
    batches: Sequence[Batch],
    evaluate_every: int,
    progress: ContestProgress | None,
) -> None:
    if not contestant.flushes:
        before = len(contestant.losses)
        contestant.stream(batches)
        due = before // evaluate_every != len(contestant.losses) // evaluate_every or not before
        if due:
            contestant.held_out_loss()
        if progress is not None:
            for _ in batches:
                progress(contestant)
        return
    for batch in batches:
        contestant.step(batch)
        due = len(contestant.losses) % evaluate_every == 0 or len(contestant.losses) == 1
        if due and contestant.timelines:
            contestant.held_out_loss()
        if progress is not None:
            progress(contestant)
