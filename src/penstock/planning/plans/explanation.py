"""``explain``: how a plan treats the weights. Who reads which version, how old gradients are, what
that costs in memory, and how fast stages may learn from them (``stability_of``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import ceil, inf, pi, sin

from penstock.base.errors import InputError
from penstock.base.units import count_of
from penstock.base.values import Value, is_number
from penstock.core.schedule import Kind, Op
from penstock.core.schedule.op import RELEASING
from penstock.core.versions import DoubleBuffer, PipeMare, Place, Policy, Predict, VerticalSync
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.summing import served_stages
from penstock.planning.plans.table import title

_LEAST_EXAMPLE = 10


class Reading(Value, frozen=True):
    """Which version of its weights a pass reads.

    Attributes:
        formula: of k, the microbatch, or t, its minibatch, both from 0; never below version 0.
        example: what that is at ``Explanation.example``.
    """

    formula: str
    example: int


class ExplainedStage(Value, frozen=True, kw_only=True):
    """The consequences of a plan for one stage.

    Attributes:
        layers: their names.
        ranks: those that hold the stage; several where it has replicas or copies.
        forward, backward: which version the two passes of a microbatch read.
        delay: updates between the version that a forward reads and the one that its gradient is
            applied to, in the steady state; a mean where microbatches differ, and the most that it
            may be where a parameter server does not wait for slow copies.
        versions_held: the most that are alive at once, on each of the ranks.
        version_bytes: memory of all these versions.
        extra_bytes: memory of PipeMare's δ.
        activations_in_flight: the most microbatches whose activations a rank keeps; 1 where
            backwards go through the newest.
        activation_bytes: memory of these activations.
        stability_bound: ``stability_bound`` of the delay.
        rate_factor: what the learning rate is multiplied by because updates are means over
            replicas, or because a policy makes up for old gradients.
    """

    layers: tuple[str, ...]
    ranks: tuple[int, ...]
    forward: Reading
    backward: Reading
    delay: float
    versions_held: int
    version_bytes: int
    extra_bytes: int
    activations_in_flight: int
    activation_bytes: int
    stability_bound: float
    rate_factor: float


class Explanation(Value, frozen=True, kw_only=True):
    """How a plan treats the weights.

    Attributes:
        title: the plan in a line.
        synchronous: whether the pipeline drains at each update.
        summary: what its policy does, in sentences.
        example: the microbatch k of the examples, in the steady state; in a synchronous plan, the
            first of the second minibatch.
        stages: one for each.
    """

    title: str
    synchronous: bool
    summary: str
    example: int
    stages: tuple[ExplainedStage, ...]

    def largest_rate(self, stage: int, curvature: float) -> float:
        """The largest learning rate that is stable at a stage where the loss has this curvature;
        infinite where it has none."""
        figures = self.stages[stage]
        if curvature <= 0:
            return inf
        return figures.stability_bound / figures.rate_factor / curvature


def stability_bound(delay: float) -> float:
    """The largest learning rate × curvature with which plain SGD on a quadratic is stable if its
    gradients are ``delay`` updates old: 2·sin(π/(4τ+2)).

    Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", arXiv 1910.05124, section
    3.1.

    >>> round(stability_bound(0), 9), round(stability_bound(1), 9)
    (2.0, 1.0)

    Args:
        delay: τ, in updates.

    Raises:
        InputError: the delay is no number ≥ 0.
    """
    if not is_number(delay) or not 0 <= delay < inf:
        raise InputError(f"the delay is {delay!r}, but must be a number of updates ≥ 0")
    return 2 * sin(pi / (4 * delay + 2))


def explain(plan: Plan) -> Explanation:
    """Say what a plan does to the weights, from the plan alone.

    The examples are read off the simulated stream, so they are what the runtime does.
    """
    policy, places = plan.versions, [plan.place(stage) for stage in range(len(plan.stages))]
    example = plan.num_microbatches
    if policy.asynchronous:
        example = max(_LEAST_EXAMPLE, *(_first_steady(plan, place) for place in places))
    ranks, forwards, backwards, in_flight = _walk(plan, example)
    if policy.activations == "newest":
        in_flight = [1] * len(in_flight)
    stages = (
        ExplainedStage(
            layers=stage.layers,
            ranks=ranks[place.stage],
            forward=Reading(_forward(plan, place), forwards[place.stage]),
            backward=Reading(_backward(plan, place), backwards[place.stage]),
            delay=_delay(plan, place),
            versions_held=policy.versions_held(place),
            version_bytes=policy.versions_held(place) * stage.parameter_bytes,
            extra_bytes=stage.parameter_bytes if _has_drift(policy, place) else 0,
            activations_in_flight=in_flight[place.stage],
            activation_bytes=stage.bytes_in_flight(in_flight[place.stage]),
            stability_bound=stability_bound(_delay(plan, place)),
            rate_factor=_rate_factor(plan, place.stage),
        )
        for stage, place in zip(plan.stages, places, strict=True)
    )
    return Explanation(
        title=title(plan),
        synchronous=not policy.asynchronous,
        summary=_summary(plan),
        example=example,
        stages=tuple(stages),
    )


def _delay(plan: Plan, place: Place) -> float:
    late = plan.summing.stale if place.stage in served_stages(plan) else 0
    return plan.versions.delay(place) + late


def steady_minibatch(plan: Plan) -> int:
    """The first minibatch of a stream, from 0, all of whose microbatches have the delay of the
    steady state at every stage; 0 for a synchronous plan."""
    if not plan.versions.asynchronous:
        return 0
    first = max(_first_steady(plan, plan.place(stage)) for stage in range(len(plan.stages)))
    return ceil(first / plan.num_microbatches)


def _first_steady(plan: Plan, place: Place) -> int:
    """The first microbatch that has the delay of the steady state at a stage."""
    updates = ceil(plan.versions.delay(place))
    if plan.versions.updates == "minibatch":
        return updates * plan.num_microbatches
    return updates * plan.replicas[place.stage]


def _walk(
    plan: Plan, example: int
) -> tuple[list[tuple[int, ...]], list[int], list[int], list[int]]:
    """By stage, from the predicted timeline: ranks, what the example's forward and backward read,
    and the most microbatches in flight on one rank."""
    count = len(plan.stages)
    forwards, backwards, in_flight = [0] * count, [0] * count, [0] * count
    if not plan.versions.asynchronous:
        schedule = plan.placement
        for ops in schedule.ranks:
            in_flight = list(map(max, in_flight, map(partial(_most_in_flight, ops), range(count))))
        ranks = [schedule.ranks_of(stage) for stage in range(count)]
        # Its weights are those after the first minibatch's update.
        return ranks, [1] * count, [1] * count, in_flight
    timeline = plan.prediction.stream_behind(example + 1)
    for row in timeline.rows:
        in_flight = list(map(max, in_flight, map(partial(_most_in_flight, row.ops), range(count))))
        for op, version in zip(row.ops, row.versions or (), strict=True):
            if op.microbatch == example and op.kind is Kind.FORWARD:
                forwards[op.stage] = version
            elif op.microbatch == example and op.kind in RELEASING:
                backwards[op.stage] = version
    ranks = [
        tuple(rank for rank, stages in enumerate(timeline.stages_of) if stage in stages)
        for stage in range(count)
    ]
    return ranks, forwards, backwards, in_flight


def _most_in_flight(ops: Sequence[Op], stage: int) -> int:
    """Microbatches that have gone forward and not yet all the way back."""
    stage_ops = (op for op in ops if op.stage == stage and op.slice == 0)
    steps = (1 if op.kind is Kind.FORWARD else -(op.kind in RELEASING) for op in stage_ops)
    return max(accumulate(steps, initial=0))


def _forward(plan: Plan, place: Place) -> str:
    policy = plan.versions
    if not policy.asynchronous:
        return "t"
    if isinstance(policy, DoubleBuffer):
        return "t−1"
    if isinstance(policy, VerticalSync):
        return _less(_microbatch(plan.replicas[place.stage]), place.num_stages - 1)
    newest = _newest(plan, place)
    if isinstance(policy, Predict) and policy.forward_steps(place):
        return f"{newest}, predicted {policy.forward_steps(place)} ahead"
    return newest


def _newest(plan: Plan, place: Place) -> str:
    """The updates made before a forward, as a formula."""
    replicas, size = plan.replicas[place.stage], plan.num_microbatches
    done = _less(_microbatch(replicas), place.warm_up)
    if plan.versions.updates == "microbatch":
        return done
    if not place.warm_up:
        return "t"
    if size % replicas:
        return "the newest"  # minibatches give replicas different shares
    return f"⌊({done})/{size // replicas}⌋" if size > replicas else done


def _backward(plan: Plan, place: Place) -> str:
    policy = plan.versions
    if policy.stashes:
        return "as its forward"
    newest = _microbatch(plan.replicas[place.stage]) if policy.updates == "microbatch" else "t"
    if isinstance(policy, Predict) and policy.backward_steps(place):
        return f"{newest}, predicted {policy.backward_steps(place)} ahead"
    if isinstance(policy, PipeMare) and _has_drift(policy, place):
        return f"{newest}, less {policy.tau(place):.3g}·δ"
    return newest


def _microbatch(replicas: int) -> str:
    return "k" if replicas == 1 else f"⌊k/{replicas}⌋"


def _less(number: str, by: int) -> str:
    return f"{number}−{by}" if by else number


def _has_drift(policy: Policy, place: Place) -> bool:
    return isinstance(policy, PipeMare) and policy.t2 is not None and policy.tau(place) > 0


def _rate_factor(plan: Plan, stage: int) -> float:
    """As the engine has it: an update per microbatch is the mean over r replicas, with r times the
    rate; and what the policy does about the age of gradients."""
    policy = plan.versions
    by_microbatch = policy.asynchronous and policy.updates == "microbatch"
    replicas = float(plan.replicas[stage]) if by_microbatch else 1.0
    return replicas * policy.damping(plan.place(stage))


_IN_TURN = (
    "Parameter servers in processes of their own step and answer bucket by bucket while gradients "
    "still come, if the optimizer is one of torch's that treat each number by itself; clipping, a "
    "grad_scaler, tensor ranks or another optimizer make them wait for all gradients."
)


def _summary(plan: Plan) -> str:
    policy = plan.versions
    if plan.summing.stale:
        most = count_of(plan.summing.stale, "update")
        return (
            "Stale-synchronous: stages with copies are updated by a parameter server as soon as "
            "one copy has handed in a minibatch; gradients of the others may come in a later "
            f"update, late by {most} at most. Within a copy the pipeline drains, and one version "
            "is held. What is learned depends on who was late, as pipeline.stale_streams tells."
        )
    if not policy.asynchronous:
        served = " " + _IN_TURN if served_stages(plan) else ""
        return (
            "Synchronous: all microbatches of minibatch t read version t in both passes, and the "
            "pipeline drains at each update, so gradients are never old. One version is held, and "
            f"the results are those of one device.{served}"
        )
    every = "minibatch" if policy.updates == "minibatch" else "microbatch (of every replica)"
    if policy.updates == "microbatch" and set(plan.replicas) == {1}:
        every = "microbatch"
    start = f"Asynchronous: each stage updates after every {every}, and the pipeline never drains. "
    return start + " ".join(_details(policy))


def _details(policy: Policy) -> list[str]:
    if policy.stashes:
        return ["A backward reads the version that its forward read."]
    if policy.activations == "newest":
        return [
            "A backward goes through what the newest forward of its stage has left, with the "
            "weights that made it; a gradient is as many frames old as its delay says."
        ]
    sentences = ["No old version is kept: a backward reads the weights of its own time."]
    if isinstance(policy, Predict):
        sentences.append(
            "Forwards read what the weights are predicted to be when the backward comes."
        )
    if isinstance(policy, PipeMare):
        if policy.t1 is not None:
            sentences.append(f"T1: the learning rate is whole from update {policy.t1} on.")
        if policy.t2 is not None:
            sentences.append("T2: backwards go back by τ times the weights' own drift δ.")
        if policy.t3:
            sentences.append(f"T3: the first {policy.t3} minibatches are synchronous.")
    return sentences


class Stability(Value, frozen=True, kw_only=True):
    """Whether a stage learns slowly enough for its delay.

    Attributes:
        stage: its number.
        delay: by how many updates its gradients are late.
        learning_rate: what its optimizer is given.
        curvature: the largest that the loss has in the stage's weights.
        product: rate × curvature, times what replicas or the policy multiply the rate by.
        bound: the largest product that is stable.
        largest_rate: the largest learning rate that is stable; infinite without curvature.
    """

    stage: int
    delay: float
    learning_rate: float
    curvature: float
    product: float
    bound: float
    largest_rate: float

    @property
    def stable(self) -> bool:
        """Whether the product is within the bound."""
        return self.product <= self.bound

    @property
    def words(self) -> str:
        """The comparison in a sentence, and what to do if it is beyond the bound."""
        factor = self.product / (self.learning_rate * self.curvature) if self.product else 1.0
        replicas = f" × {factor:.3g} replicas" if factor > 1 + 1e-9 else ""
        replicas = f" / {1 / factor:.3g} for their age" if factor < 1 - 1e-9 else replicas
        compared = (
            f"stage {self.stage}: learning rate {self.learning_rate:.3g} × curvature "
            f"{self.curvature:.3g}{replicas} = {self.product:.3g} is "
            f"{'within' if self.stable else 'beyond'} {self.bound:.3g}, the bound for "
            f"{delay_of(self.delay)}"
        )
        if self.stable:
            return compared
        lower = f"lower the learning rate below {self.largest_rate:.2g}"
        if not self.delay:
            return f"{compared}: {lower}"
        return f"{compared}: {lower}, {_less_delay(self.delay)}"


def check_stability(
    explanation: Explanation, learning_rate: float, curvatures: Sequence[float]
) -> tuple[Stability, ...]:
    """Compare learning rate × curvature with the bound of every stage's delay.

    Args:
        explanation: of a plan.
        learning_rate: that each stage's optimizer is given.
        curvatures: the largest of the loss in each stage's weights; one number per stage.

    Raises:
        InputError: a rate that is negative, or not one curvature per stage.
    """
    if not is_number(learning_rate) or not 0 <= learning_rate < inf:
        raise InputError(f"the learning rate is {learning_rate!r}, but must be a number ≥ 0")
    if len(curvatures) != len(explanation.stages):
        raise InputError(
            f"there are {len(curvatures)} curvatures, but the plan has {len(explanation.stages)} "
            "stages; give one for each"
        )
    return tuple(
        Stability(
            stage=index,
            delay=stage.delay,
            learning_rate=learning_rate,
            curvature=curvature,
            product=learning_rate * stage.rate_factor * curvature,
            bound=stage.stability_bound,
            largest_rate=explanation.largest_rate(index, curvature),
        )
        for index, (stage, curvature) in enumerate(zip(explanation.stages, curvatures, strict=True))
    )


def delay_of(delay: float) -> str:
    """A delay in words.

    >>> delay_of(0), delay_of(1), delay_of(2.5)
    ('gradients without delay', 'a delay of 1 update', 'a delay of 2.5 updates')
    """
    if not delay:
        return "gradients without delay"
    return f"a delay of {delay:.3g} update{'' if delay == 1 else 's'}"


def _less_delay(delay: float) -> str:
    policy = "versions.DoubleBuffer(): 1; " if delay > 1 else ""
    return (
        f"or train with less delay ({policy}a schedule that flushes: 0), or begin with smaller "
        "steps (versions.PipeMare(t1=…), optimizers.delay_corrected)"
    )
