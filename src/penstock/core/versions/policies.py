"""The policies: what each says about versions, delays and memory.

``BasePolicy``: the questions that all policies answer; ``Place``: the stage they are about.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Literal, get_args

from penstock.base.errors import InputError
from penstock.base.values import Value, is_number, is_whole, one_of, shown
from penstock.core.schedule.op import Activations

Updates = Literal["microbatch", "minibatch"]


@dataclass(frozen=True)
class Place:
    """Where a stage stands in a pipeline.

    Attributes:
        stage: its number, from 0.
        num_stages: how many the pipeline has.
        warm_up: forwards that it (each of its replicas) runs before its first backward.
        per_update: microbatches (of each replica) that make one update.
    """

    stage: int
    num_stages: int
    warm_up: int
    per_update: float = 1.0


class BasePolicy(Value, frozen=True, tag_field="policy"):
    """The questions that every policy answers."""

    asynchronous: ClassVar[bool] = True
    stashes: ClassVar[bool] = True
    """Whether a backward reads what its forward read; otherwise, the weights of its own time."""
    activations: ClassVar[Activations] = "own"
    """Which activations a backward goes through: its own forward's, or the newest of its stage."""
    ahead: ClassVar[int] = 1
    """How far forwards run ahead in the order of its schedule, as ``rounds.warm_up`` takes it."""
    family: ClassVar[str] = "pipedream"
    """The schedule that it usually runs on."""
    updates: Updates = "microbatch"

    def __post_init__(self) -> None:
        one_of("updates", self.updates, ("microbatch", "minibatch"))

    @property
    def name(self) -> str:
        """For people and files."""
        return str(self.__struct_config__.tag)

    def forward_version(self, round: int, newest: int, num_stages: int) -> int:
        """The version that a forward reads.

        Args:
            round: which update of the stage its gradient will be part of, from 0.
            newest: how many updates the stage has made so far.
            num_stages: how many the pipeline has.
        """
        return newest

    def delay(self, place: Place) -> float:
        """Updates between the version that a forward reads and the one that its gradient is applied
        to, in the steady state; a mean where microbatches of a minibatch read different ones."""
        return place.warm_up / place.per_update

    def damping(self, place: Place) -> float:
        """The factor of a stage's learning rates, because its gradients are old."""
        return 1.0

    def versions_held(self, place: Place) -> int:
        """The most versions of a stage's weights that are alive at once."""
        return ceil(place.warm_up / place.per_update) + 1

    def extra_copies(self, place: Place) -> int:
        """Further buffers as large as the weights that stay from update to update."""
        return 0


Rates = Literal["divided", "given"]


class Flush(BasePolicy, frozen=True, tag="flush"):
    """Flush: all microbatches of a minibatch read the same weights, and the pipeline drains at each
    update. What one device computes.

    ``W(t+1) = W(t) − ν∇f_t(W(t))``: minibatch t reads version t at every stage, forward and
    backward. No delay, one version.

    Wins: As the first choice, and whenever m is at least 4p: 1F1B then works more than 80 % of the
    time, m/(m+p−1), and nothing has to be tuned anew.

    Loses: When m cannot be much larger than p: at m = p nearly half of the devices' time goes into
    filling and draining. Schedules that split the backward win back a part of it and still flush.

    Paper: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, arXiv
    2006.09503, section 3.3, where it is called PipeDream-Flush.
    """

    asynchronous: ClassVar[bool] = False
    family: ClassVar[str] = "1f1b"
    updates: Updates = "minibatch"

    def __post_init__(self) -> None:
        _minibatch_only(self)

    def delay(self, place: Place) -> float:
        """0."""
        return 0.0

    def versions_held(self, place: Place) -> int:
        """1."""
        return 1


class Latest(BasePolicy, frozen=True, tag="latest"):
    """Latest: every pass reads whatever is there, and nothing is kept. A backward goes with the
    newest weights through what the forward computed with older ones, which is the gradient of no
    single function.

    ``w(k+1) = w(k) − ν·g_k``, where the forward of microbatch k read version k−(p−1−s) at stage s,
    and the backward, which made ``g_k``, reads version k. One version; what a forward has read is
    p−1−s updates old.

    Wins: When even a second version does not fit, the pipeline is short and steps are small: over
    p−1−s small steps, weights hardly change. And as what all other policies are to be held against.

    Loses: When steps are large, as at the beginning of training, or p is: besides being late,
    gradients are wrong by what happened between forward and backward.

    Paper: Described, as what weight stashing avoids, in Harlap et al., "PipeDream: Fast and
    Efficient Pipeline Parallel DNN Training", arXiv 1806.03377.

    Attributes:
        updates: after each ``"microbatch"``, or once per ``"minibatch"``.
    """

    stashes: ClassVar[bool] = False

    def versions_held(self, place: Place) -> int:
        """1."""
        return 1


class Stash(BasePolicy, frozen=True, tag="stash"):
    """Weight stashing: a backward reads the version that its forward read; the delay is p−1−s
    updates at stage s.

    ``w_s(k+1) = w_s(k) − ν∇_s f_k(w_0(k−p+1), …, w_{p−1}(k))``: microbatch k reads version
    k−(p−1−s) at stage s, forward and backward. Gradients are those of one function, but of a model
    that never was: its stages near the input are older than those near the output. p−s versions.

    Wins: When m is small, so that a flush would cost much, and p is small, or weights are small
    beside activations.

    Loses: When weights are large: the first stage holds p versions of them. When p is large: the
    first stage learns from gradients that are p−1 updates old, and the largest stable step shrinks
    about as 1/p.

    Paper: Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", arXiv
    1806.03377; then Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN
    Training", SOSP 2019, section 3.3.

    Attributes:
        updates: after each ``"microbatch"``, or once per ``"minibatch"``.
    """


class VerticalSync(BasePolicy, frozen=True, tag="vertical-sync"):
    """Vertical sync: a microbatch reads at every stage the version that its first stage read; the
    delay is p−1 updates everywhere, and so is the number of old versions.

    ``w(k+1) = w(k) − ν∇f_k(w(k−p+1))``: microbatch k reads version max(0, k−(p−1)) at every stage,
    forward and backward. Every gradient is that of a model that has been, a fixed delay ago. p
    versions.

    Wins: When a delay should be the same everywhere, so that theory for delayed gradients holds as
    it stands.

    Loses: On memory, always: p versions at every stage, also where weight stashing needs one. And
    the last stages, which could learn without delay, wait as long as the first.

    Paper: Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", arXiv
    1806.03377; then Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN
    Training", SOSP 2019, section 3.3.
    """

    def __post_init__(self) -> None:
        if self.updates != "microbatch":
            raise InputError(
                "vertical sync is for updates per microbatch; with updates per minibatch, every "
                "stage reads the same version under versions.DoubleBuffer()"
            )

    def forward_version(self, round: int, newest: int, num_stages: int) -> int:
        """max(0, round − (p−1))."""
        return max(0, round - (num_stages - 1))

    def delay(self, place: Place) -> float:
        """p − 1."""
        return place.num_stages - 1.0

    def versions_held(self, place: Place) -> int:
        """p."""
        return place.num_stages


class DoubleBuffer(BasePolicy, frozen=True, tag="2bw"):
    """PipeDream-2BW: gradients of a minibatch are summed, and every stage is one update late; two
    versions are enough.

    ``W(t+1) = W(t) − ν∇f_t(W(t−1))``: microbatches of minibatch t read version max(t−1, 0) at every
    stage, forward and backward; minibatches 0 and 1 both read version 0. A minibatch must have p−1
    microbatches or more. The printed rule, max(⌊(k−1)/m⌋−1, 0), is the same and counts microbatches
    from 1.

    Wins: When there is to be no flush, as the first to try: a delay of 1 whatever p is, the same
    everywhere, and every gradient is that of a model that has been.

    Loses: When two copies of the weights do not fit. And where m is much larger than p: 1F1B's
    bubble is small then and needs neither the second version nor the delay.

    Paper: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, arXiv
    2006.09503, section 3.1.
    """

    family: ClassVar[str] = "pipedream-2bw"
    updates: Updates = "minibatch"

    def __post_init__(self) -> None:
        _minibatch_only(self)

    def forward_version(self, round: int, newest: int, num_stages: int) -> int:
        """max(0, round − 1)."""
        return max(0, round - 1)

    def delay(self, place: Place) -> float:
        """1."""
        return 1.0

    def versions_held(self, place: Place) -> int:
        """2."""
        return 2


class PipeMare(BasePolicy, frozen=True, tag="pipemare"):
    """PipeMare: no versions are kept; smaller steps and corrected backwards make up for it.

    ``w(t+1) = w(t) − α_t/max(1, τ)^(1−min(t/K, 1))·g_t``, where forwards of minibatch t read what
    is newest at their time, and backwards, which make ``g_t``, read ``w(t) − τδ``, an estimate of
    what the forward had read. Each of its three techniques can be left out, and is, unless it is
    asked for: without any, this is ``Latest(updates="minibatch")``. One version, and δ with T2.

    Wins: When weights are large: it needs no old versions, and without T2 no buffer at all. With
    minibatches of m microbatches, a gradient is (p−1−s)/m updates old on average, less than one
    where m ≥ p.

    Loses: When m is small and steps are large: τδ assumes that weights go on as they did. T1 makes
    the first K updates slower on purpose, and K and D have to be found.

    Paper: Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", arXiv 1910.05124,
    section 3.

    Attributes:
        t1: K, over how many updates the learning rate recovers from 1/τ: it is divided by
            max(1, τ)^(1−min(k/K, 1)) at update k. ``None``: not at all.
        t2: D, between 0 and 1: backwards read w − τδ, where δ follows the weights' own way,
            δ ← γδ + (1−γ)(w_{t+1}−w_t) with γ = D^(1/τ). ``None``: they read w.
        t3: how many minibatches are synchronous at first.
        delays: what τ is: the delay that the ``"schedule"`` has, or the ``"published"`` one,
            (2(P−i)+1)/N updates for stage i of P with N microbatches per update, which is that of a
            pipeline in which each stage runs forward and backward in one time slot.
        updates: as the others; per minibatch as published.
    """

    stashes: ClassVar[bool] = False
    updates: Updates = "minibatch"
    t1: int | None = None
    t2: float | None = None
    t3: int = 0
    delays: Literal["schedule", "published"] = "schedule"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("delays", self.delays, ("schedule", "published"))
        if self.t1 is not None and (not is_whole(self.t1) or self.t1 < 1):
            raise InputError(
                f"t1 is {shown(self.t1)}, but must be a number of updates ≥ 1, or None"
            )
        if self.t2 is not None and (not is_number(self.t2) or not 0 < self.t2 < 1):
            raise InputError(
                f"t2 is {shown(self.t2)}, but must be a number between 0 and 1, or None"
            )
        if not is_whole(self.t3) or self.t3 < 0:
            raise InputError(f"t3 is {shown(self.t3)}, but must be a number of minibatches ≥ 0")

    def tau(self, place: Place) -> float:
        """The delay that the corrections assume, in updates."""
        if self.delays == "schedule":
            return self.delay(place)
        return (2 * (place.num_stages - 1 - place.stage) + 1) / place.per_update

    def rate_factor(self, place: Place, update: int) -> float:
        """The factor by which T1 multiplies the learning rate at an update, counted from 0."""
        return 1.0 if self.t1 is None else rate_factor(self.tau(place), update, self.t1)

    def versions_held(self, place: Place) -> int:
        """1."""
        return 1

    def extra_copies(self, place: Place) -> int:
        """δ, with T2, at stages with a delay."""
        return int(self.t2 is not None and self.tau(place) > 0)


class Predict(BasePolicy, frozen=True, tag="predict"):
    """Weight prediction: read w − σ·lr·direction, what the weights will be σ updates later if the
    optimizer goes on as it does.

    ``w(k+1) = w(k) − ν·g_k``, where the forward of microbatch k read ``w(k−(p−1−s)) − σ·ν·d``,
    which foresees the w(k) that its backward reads. d is the direction of the optimizer's next
    step: the momentum of SGD, or m̂/(√v̂+ε) of Adam, with AdamW its weight decay too. One version;
    predicted weights live as long as one pass.

    Wins: When the optimizer has momentum, so that its next steps resemble its last, and no second
    version fits: it aims at no delay at all in the memory of one version.

    Loses: When there is little momentum or gradients are noisy: what is foreseen does not come. A
    prediction takes time in every forward, about as long as an update, and memory as large as the
    weights for as long as the pass. It knows SGD, Adam and AdamW only.

    Paper: Guan et al., "PipeOptim: Ensuring Effective 1F1B Schedule with Optimizer-Dependent Weight
    Prediction", arXiv 2312.00839; Chen et al., "Efficient and Robust Parallel DNN Training through
    Model Parallelism on Multi-GPU Platform", arXiv 1809.02839.

    Attributes:
        rule: ``"pipeoptim"`` (with Adam, XPipe): in the forward, σ = p−1−s; the backward reads the
            newest weights, which the forward had foreseen. ``"spectrain"`` (the second paper):
            σ = ⌊s/2⌋+p−1−s in the forward and ⌊s/2⌋ in the backward.
    """

    stashes: ClassVar[bool] = False
    rule: Literal["pipeoptim", "spectrain"] = "pipeoptim"

    def __post_init__(self) -> None:
        one_of("rule", self.rule, ("pipeoptim", "spectrain"))
        if self.updates != "microbatch":
            raise InputError("prediction is for updates per microbatch; leave updates out")

    def forward_steps(self, place: Place) -> int:
        """σ of a forward."""
        return place.warm_up + (place.stage // 2 if self.rule == "spectrain" else 0)

    def backward_steps(self, place: Place) -> int:
        """σ of a backward."""
        return place.stage // 2 if self.rule == "spectrain" else 0

    def versions_held(self, place: Place) -> int:
        """1; the predicted weights live as long as one pass."""
        return 1


class Sideways(BasePolicy, frozen=True, tag="sideways"):
    """Sideways: a gradient goes back through the newest activations of each stage, with the weights
    that have just made them, so that one version and one frame's activations are enough.

    ``w_s(k+1) = w_s(k) − ν·J_s(x_{k+2(p−1−s)}; w_s(k))ᵀδ_k``: the gradient δ of frame k, as the
    next stage hands it over, is multiplied by the Jacobian of a younger frame. Forward and backward
    read the same weights, but at stage s a gradient is that of a frame 2(p−1−s) frames ago. One
    version, and one frame's activations.

    Wins: On a live stream that changes little from one frame to the next: p devices learn from
    every frame where one could only learn from every p-th, in the memory of one.

    Loses: Where frames differ much: at cuts, with shuffled data, or if things move fast. And where
    the memory of p versions is there, for gradients that fit: then take stashing. Rates must be
    smaller, since the largest stable step is 2·sin(π/(8(p−1−s)+2)) over the curvature.

    Paper: Malinowski et al., "Sideways: Depth-Parallel Training of Video Models", CVPR 2020, arXiv
    2001.06232; Meloni et al., "PARTIME: Scalable and Parallel Processing Over Time with Deep Neural
    Networks", arXiv 2210.09147.

    Attributes:
        rates: ``"divided"``: a stage's learning rates are divided by max(1, 2(p−1−s)), how many
            frames old its gradients are, so that what is stable on one device stays so;
            ``"given"``: they stay as they are.
    """

    stashes: ClassVar[bool] = False
    activations: ClassVar[Activations] = "newest"
    ahead: ClassVar[int] = 2
    family: ClassVar[str] = "partime"
    rates: Rates = "divided"

    def __post_init__(self) -> None:
        one_of("rates", self.rates, get_args(Rates))
        if self.updates != "microbatch":
            raise InputError("sideways updates after each frame; leave updates out")

    def damping(self, place: Place) -> float:
        """1/max(1, 2(p−1−s)), unless rates are to be as they are given."""
        return 1.0 if self.rates == "given" else 1 / max(1, place.warm_up)

    def versions_held(self, place: Place) -> int:
        """1."""
        return 1


def rate_factor(delay: float, update: int, anneal_updates: int) -> float:
    """PipeMare's T1: 1/max(1, τ)^(1−min(k/K, 1)) at update k; 1 from update K on.

    Yang et al., arXiv 1910.05124, section 3.1.
    """
    return float(max(1.0, delay) ** -(1 - min(update / anneal_updates, 1.0)))


def _minibatch_only(policy: BasePolicy) -> None:
    if policy.updates != "minibatch":
        raise InputError(f"{policy.name} updates once per minibatch; leave updates out")


Policy = Flush | Latest | Stash | VerticalSync | DoubleBuffer | PipeMare | Predict | Sideways
"""Any of them."""

POLICIES: dict[str, type[Policy]] = {
    "flush": Flush,
    "latest": Latest,
    "stash": Stash,
    "vertical-sync": VerticalSync,
    "2bw": DoubleBuffer,
    "pipemare": PipeMare,
    "predict": Predict,
    "sideways": Sideways,
}
"""By name, as files and the command line write them."""

USUAL: dict[str, Policy] = {
    "pipedream": Stash(),
    "pipedream-2bw": DoubleBuffer(),
    "partime": Sideways(),
}
"""The policy that a schedule runs with if nothing else is said; all others flush."""
