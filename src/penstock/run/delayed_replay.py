"""The proof's other half where weights have versions: the same stream, one microbatch at a time.

One process goes through the microbatches in order, forward and backward through all stages, with
exactly the weights that ``penstock.versions`` says each pass reads. All versions of a stream are
kept, so nothing has to be timed: a weight of some updates ago is looked up in a list. No pipeline
code is shared, so that an equal result says something about the pipeline.

Each microbatch is one autograd graph over copies of the weights that are its own. A backward that
reads other weights than its forward finds them there, because they are written over the copies in
between; whatever else autograd saved stays as the forward left it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock import microbatches
from penstock.errors import InputError, ModelError
from penstock.microbatches import Weight, Weighting
from penstock.randomness import LayerStreams
from penstock.schedule.rounds import Rounds, warm_up
from penstock.spine import NamedLayer, Skip, run_layer, spine_of
from penstock.versions import (
    DoubleBuffer,
    Flush,
    Latest,
    PipeMare,
    Place,
    Policy,
    Predict,
    VerticalSync,
)

Tensors = dict[str, Tensor]
OptimizerFactory = Callable[["StageParameters"], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class StageParameters(list[nn.Parameter]):
    """The parameters of one stage, as the optimizer factory gets them.

    Attributes:
        stage: its number, from 0.
        num_stages: of the model.
        delay: how many updates old its gradients are when they are applied, in the steady state.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], place: Place, delay: float) -> None:
        super().__init__(named.values())
        self._named = dict(named)
        self.stage = place.stage
        self.num_stages = place.num_stages
        self.delay = delay

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter) of each."""
        return iter(self._named.items())


class Read(NamedTuple):
    """What one microbatch read at one stage. All numbers count from 0 in each stream.

    Attributes:
        stage: where.
        microbatch: which.
        forward_version: of the weights that its forward read.
        backward_version: of those that its backward read.
        update: which update of the stage applied its gradient; it makes version ``update + 1``.
    """

    stage: int
    microbatch: int
    forward_version: int
    backward_version: int
    update: int

    @property
    def delay(self) -> int:
        """Updates between the version that the forward read and the one that is updated."""
        return self.update - self.forward_version


class DelayedReplay:
    """Train a model with the weight versions of an asynchronous pipeline, without a pipeline.

    Args:
        model: as given to ``Pipeline``. Its parameters are always the newest weights.
        cuts: how many layers of the spine each stage has.
        versions: which weights each pass reads; ``penstock.versions`` names the papers.
        num_microbatches: per minibatch; fewer where a minibatch has fewer rows.
        loss: from (output, targets) of a microbatch to a scalar.
        optimizer: makes the optimizer of a stage; called once for each stage with parameters.
        replicas: of each stage; one of each by default. Where each microbatch is an update, the
            gradients of r replicas are averaged (summed if the loss is a sum), and all learning
            rates of the stage are r times what the factory gave.
        lr_scheduler: makes the scheduler of an optimizer; stepped after each update of its stage.
        clip_stage_norm: the most that the norm of one stage's gradients may be at an update.
        seed: of dropout; a pipeline with the same seed draws the same. Default: torch's.
        reduction: ``"mean"`` or ``"sum"``: what the loss does over its rows.
        weight: how many terms of the mean the targets of a microbatch hold; default: rows.

    Attributes:
        reads: of the last stream, by microbatch and then by stage; PipeMare's synchronous
            minibatches are not part of it.

    Raises:
        InputError: cuts or replicas that do not fit the model or each other, or a policy that
            cannot foresee what this optimizer does.
        ModelError: the model has no spine, or two stages share a parameter.
    """

    def __init__(  # noqa: PLR0913 - a reference takes what the pipeline takes
        self,
        model: nn.Module,
        cuts: Sequence[int],
        versions: Policy,
        num_microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        optimizer: OptimizerFactory,
        *,
        replicas: Sequence[int] | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        clip_stage_norm: float | None = None,
        seed: int | None = None,
        reduction: str = "mean",
        weight: Weight | None = None,
    ) -> None:
        layers = spine_of(model)
        counts = (1,) * len(cuts) if replicas is None else tuple(replicas)
        _check(versions, cuts, counts, len(layers), num_microbatches)
        self._policy = versions
        self._replicas = counts
        self._num_microbatches = num_microbatches
        self._loss = loss
        self._loss_index = len(layers)
        self._streams = LayerStreams(torch.initial_seed() if seed is None else seed)
        self._weighting = Weighting(reduction, weight)
        self._clip_stage_norm = clip_stage_norm
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._stages = []
        for number, (first, end) in enumerate(pairwise(accumulate(cuts, initial=0))):
            stage = _Stage(layers[first:end], first, self._place(number), counts[number], versions)
            stage.take_optimizer(names, optimizer, lr_scheduler)
            self._stages.append(stage)
        self._num_minibatches = 0
        self.reads: list[Read] = []

    def _place(self, stage: int) -> Place:
        by_microbatch = self._policy.updates == "microbatch"
        per_update = 1.0 if by_microbatch else self._num_microbatches / self._replicas[stage]
        return Place(stage, len(self._replicas), warm_up(self._replicas, stage), per_update)

    def train(self, batches: Iterable[tuple[Any, Any]]) -> list[Tensor]:
        """Train on one stream: microbatches and versions count from 0, and all updates are made.

        Optimizers, schedulers and corrections go on from the stream before.

        Args:
            batches: (inputs, targets) of each minibatch.

        Returns:
            The loss of each minibatch: the mean over its terms (or the sum), each microbatch with
            the weights that its forward read.
        """
        minibatches = [self._cut(inputs, targets) for inputs, targets in batches]
        at_first = self._policy.t3 if isinstance(self._policy, PipeMare) else 0
        synchronous = max(0, at_first - self._num_minibatches)
        losses = self._stream(minibatches[:synchronous], Flush())
        return losses + self._stream(minibatches[synchronous:], self._policy)

    def _cut(self, inputs: Any, targets: Any) -> list[_Part]:
        count = min(self._num_microbatches, microbatches.num_rows(inputs, "inputs"))
        wanted = microbatches.split(targets, count)
        given, shares = microbatches.split(inputs, count), self._weighting.of(wanted)
        columns = zip(given, wanted, shares, strict=True)
        return [_Part(number, *column) for number, column in enumerate(columns)]

    def _stream(self, minibatches: list[list[_Part]], policy: Policy) -> list[Tensor]:
        account = _Account(policy, self._replicas, tuple(accumulate(map(len, minibatches))))
        for stage in self._stages:
            stage.begin()
        self.reads = []
        losses = []
        k = 0
        for minibatch in minibatches:
            total: Tensor | None = None
            for part in minibatch:
                term = self._microbatch(k, part, account)
                if term is not None:
                    total = term if total is None else total + term
                k += 1
            assert total is not None  # a minibatch without any terms is refused
            losses.append(total)
            self._num_minibatches += 1
        return losses

    def _microbatch(self, k: int, part: _Part, account: _Account) -> Tensor | None:
        """Forward, backward, and the updates that are then due; its share of the loss."""
        reads = [account.read(number, k) for number in range(len(self._stages))]
        pairs = list(zip(self._stages, reads, strict=True))
        copies = [stage.copies(account.policy, read.forward_version) for stage, read in pairs]
        loss = self._forward(part, copies)
        # The mean of no terms is NaN, and NaN · 0 as well.
        term = loss * part.share if part.share else None
        if term is not None:
            for (stage, read), own in zip(pairs, copies, strict=True):
                now = stage.backward_weights(account.policy, read.backward_version)
                for name, leaf in own.items():
                    leaf.data.copy_(now[name])
            # Where each microbatch is an update, it is a minibatch of its own.
            graph = term if account.by_minibatch else loss
            graph.backward()  # type: ignore[no-untyped-call]
        averages = self._weighting.reduction == "mean" and not account.by_minibatch
        for number, (stage, own) in enumerate(zip(self._stages, copies, strict=True)):
            stage.gather(k, {name: leaf.grad for name, leaf in own.items()})
            if account.completes_round(number, k):
                stage.update(account.policy, averages, self._clip_stage_norm)
        self.reads += reads
        return None if term is None else term.detach()

    def _forward(self, part: _Part, copies: list[Tensors]) -> Tensor:
        draw = partial(_draw, self._streams, (self._num_minibatches, part.number))
        skips: dict[str, Skip] = {}
        value = part.inputs
        for stage, own in zip(self._stages, copies, strict=True):
            value = stage.run(own, value, skips, draw)
        loss: Tensor = draw(self._loss_index, True, partial(self._loss, value), part.targets)
        return loss


class _Part(NamedTuple):
    """A microbatch: its number within the minibatch, and what share it has of its loss."""

    number: int
    inputs: Any
    targets: Any
    share: float


class _Account:
    """Which versions the passes of one stream read, and when its stages update."""

    def __init__(self, policy: Policy, replicas: tuple[int, ...], ends: tuple[int, ...]) -> None:
        self.policy = policy
        self.by_minibatch = policy.updates == "minibatch"
        self._replicas = replicas
        self._ends = ends
        self._rounds = Rounds(replicas, ends if self.by_minibatch else None)

    def read(self, stage: int, k: int) -> Read:
        """What microbatch k reads at a stage."""
        round_ = self._rounds.of(stage, k)
        match self.policy:
            case Flush():
                forward = round_
            case VerticalSync():
                forward = max(0, round_ - (len(self._replicas) - 1))
            case DoubleBuffer():
                forward = max(0, round_ - 1)
            case _:
                forward = self._newest(stage, k)
        unstashed = isinstance(self.policy, Latest | PipeMare | Predict)
        return Read(stage, k, forward, round_ if unstashed else forward, round_)

    def _newest(self, stage: int, k: int) -> int:
        """Updates that a pipeline has made at a stage when the forward of microbatch k runs there.

        Its replica takes every r-th microbatch. Before its forward of the j-th of them, from 0, it
        ran the backwards of the first j − W, where W is its warm-up.
        """
        replicas = self._replicas[stage]
        done = max(0, k // replicas - warm_up(self._replicas, stage))
        if not self.by_minibatch:
            return done
        gone_back = range(k % replicas, k, replicas)[:done]
        minibatches = islice(pairwise((0, *self._ends)), self._rounds.of(stage, k))
        return sum(
            all(i in gone_back for i in range(start, end) if i % replicas == k % replicas)
            for start, end in minibatches
        )

    def completes_round(self, stage: int, k: int) -> bool:
        """Whether a stage updates after microbatch k; at the end of the stream, it always does."""
        return k + 1 == self._ends[-1] or self._rounds.of(stage, k) < self._rounds.of(stage, k + 1)


def _draw(
    streams: LayerStreams,
    key: tuple[int, int],
    layer: int,
    training: bool,
    run: Callable[[Any], Any],
    value: Any,
) -> Any:
    """Run a layer where it draws its random numbers; ``key`` is (minibatch, microbatch in it)."""
    with streams.stream(layer, training, *key) as stream:
        result = run(value)
    streams.learn(layer, training, stream)
    return result


class _Version(NamedTuple):
    """A stage after some update; all by name of the parameter.

    Attributes:
        weights: of the stage.
        drift: PipeMare's δ.
        optimizer: what it keeps of the parameter, and the settings of its group.
    """

    weights: Tensors
    drift: Tensors
    optimizer: dict[str, dict[str, Any]]


class _Stage(nn.Module):
    """One stage: its newest weights, which are the model's, and all versions of the stream."""

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        first_layer: int,
        place: Place,
        replicas: int,
        policy: Policy,
    ) -> None:
        super().__init__()
        self.modules_used = nn.ModuleList(layer.module for layer in layers)
        self._layers = list(enumerate(layers, first_layer))
        self._place = place
        self._replicas = replicas
        self._policy = policy
        self._own = dict(self.named_parameters())
        self._places = _places(self)
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self._drift = {name: torch.zeros_like(one) for name, one in self._newest().items()}
        self._asynchronous_updates = 0
        self._versions: list[_Version] = []
        self._gradients: list[tuple[int, Mapping[str, Tensor | None]]] = []

    def take_optimizer(
        self,
        names: dict[int, str],
        optimizer: OptimizerFactory,
        lr_scheduler: SchedulerFactory | None,
    ) -> None:
        """Make the optimizer and its scheduler; ``names`` loses the parameters that are taken."""
        if any(id(parameter) not in names for parameter in self._own.values()):
            raise ModelError(
                f"stage {self._place.stage} shares a parameter with a stage before it, where it "
                "would have other versions; let one stage have all layers that use it"
            )
        named = {names.pop(id(parameter)): parameter for parameter in self._own.values()}
        if not named:
            return
        made = optimizer(StageParameters(named, self._place, self._policy.delay(self._place)))
        if isinstance(self._policy, Predict):
            _check_foreseeable(made)
        if self._policy.updates == "microbatch" and self._replicas > 1:
            for group in made.param_groups:
                for rate in {"lr", "initial_lr"} & group.keys():
                    group[rate] = group[rate] * self._replicas
        self._optimizer = made
        self._scheduler = lr_scheduler(made) if lr_scheduler else None

    def run(
        self, copies: Tensors, value: Any, skips: dict[str, Skip], draw: Callable[..., Any]
    ) -> Any:
        """All layers, with copies in the place of the model's weights."""
        # Told to care for ties itself, torch leaves a copy in a module that stands in two places.
        held = {place: copies[name] for place, name in self._places.items()}
        return functional_call(self, held, (value, skips, draw), tie_weights=False)

    def forward(self, value: Any, skips: dict[str, Skip], draw: Callable[..., Any]) -> Any:
        """All layers, with the weights that they hold."""
        for index, layer in self._layers:
            run = partial(run_layer, layer, skips=skips)
            value = draw(index, layer.module.training, run, value)
        return value

    def begin(self) -> None:
        """A new stream: what the weights are now is version 0."""
        self._versions = [self._snapshot()]

    def _newest(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self._own.items()}

    def _snapshot(self) -> _Version:
        kept = {}
        names = {id(parameter): name for name, parameter in self._own.items()}
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                settings = {key: value for key, value in group.items() if key != "params"}
                adamw = isinstance(self._optimizer, torch.optim.AdamW)
                settings["decays_apart"] = adamw or group.get("decoupled_weight_decay", False)
                for parameter in group["params"]:
                    state = self._optimizer.state.get(parameter, {})
                    kept[names[id(parameter)]] = copy.deepcopy({**settings, **state})
        return _Version(self._newest(), self._drift, kept)

    def copies(self, policy: Policy, version: int) -> Tensors:
        """What a forward of this version reads, as leaves of a graph of its own."""
        found = self._versions[version]
        weights = found.weights
        if isinstance(policy, Predict):
            weights = _foreseen(found, policy.forward_steps(self._place))
        return {
            name: nn.Parameter(weights[name].clone(), requires_grad=parameter.requires_grad)
            for name, parameter in self._own.items()
        }

    def backward_weights(self, policy: Policy, version: int) -> Tensors:
        """What a backward of this version reads."""
        found = self._versions[version]
        if isinstance(policy, Predict):
            return _foreseen(found, policy.backward_steps(self._place))
        if isinstance(policy, PipeMare) and policy.t2 is not None:
            tau = policy.tau(self._place)
            return {
                name: weight - tau * found.drift[name] for name, weight in found.weights.items()
            }
        return found.weights

    def gather(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Keep the gradients of a microbatch until the update."""
        self._gradients.append((microbatch % self._replicas, gradients))

    def update(self, policy: Policy, averages: bool, clip_norm: float | None) -> None:
        """Apply what was gathered; there is one more version."""
        for name, parameter in self._own.items():
            total = _sum(self._of_replica(replica, name) for replica in range(self._replicas))
            if total is not None and averages:
                total = total / len(self._gradients)
            parameter.grad = total
        self._gradients = []
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self._own.values(), clip_norm)
        if self._optimizer is not None:
            self._step(self._optimizer, policy)
            self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
        self._follow_drift()
        self._versions.append(self._snapshot())

    def _of_replica(self, replica: int, name: str) -> Tensor | None:
        return _sum(found[name] for owner, found in self._gradients if owner == replica)

    def _step(self, optimizer: torch.optim.Optimizer, policy: Policy) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        if isinstance(policy, PipeMare):
            factor = policy.rate_factor(self._place, self._asynchronous_updates)
            self._asynchronous_updates += 1
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _follow_drift(self) -> None:
        """δ ← γδ + (1−γ)(w_{t+1} − w_t) with γ = D^(1/τ)."""
        policy = self._policy
        if isinstance(policy, PipeMare) and policy.t2 is not None and policy.tau(self._place) > 0:
            gamma = policy.t2 ** (1 / policy.tau(self._place))
            before, after = self._versions[-1].weights, self._newest()
            self._drift = {
                name: gamma * drift + (1 - gamma) * (after[name] - before[name])
                for name, drift in self._drift.items()
            }


def _places(stage: nn.Module) -> dict[str, str]:
    """Every place in which some module holds a parameter, and the parameter's name."""
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    return {
        f"{prefix}.{name}": names[id(parameter)]
        for prefix, module in stage.named_modules()  # each module once
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def _foreseen(version: _Version, steps: int) -> Tensors:
    """w − σ·lr·direction, with the optimizer as it was at that version."""
    found = dict(version.weights)
    for name, kept in version.optimizer.items():
        direction = _direction(found[name], kept)
        if direction is not None and steps:
            found[name] = found[name] - steps * float(kept["lr"]) * direction
    return found


def _direction(weight: Tensor, kept: dict[str, Any]) -> Tensor | None:
    """Momentum of SGD, m̂/(√v̂+ε) of Adam; ``None`` before the first step."""
    if "exp_avg" not in kept:
        return kept.get("momentum_buffer")
    count, (beta1, beta2) = float(kept["step"]), kept["betas"]
    mean = kept["exp_avg"] / (1 - beta1**count)
    square = kept["exp_avg_sq"] / (1 - beta2**count)
    direction: Tensor = mean / (square.sqrt() + kept["eps"])
    return direction + kept["weight_decay"] * weight if kept["decays_apart"] else direction


def _sum(gradients: Iterable[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _check(
    policy: object, cuts: Sequence[int], replicas: Sequence[int], num_layers: int, count: int
) -> None:
    if not isinstance(policy, Policy):
        raise InputError(f"versions is {policy!r}; give a policy, as in versions.Stash()")
    if not cuts or min(cuts) < 1 or sum(cuts) != num_layers:
        raise InputError(
            f"cuts are {list(cuts)}; give how many layers each stage has, at least one, and "
            f"{num_layers} in all"
        )
    if len(replicas) != len(cuts) or min(replicas) < 1:
        raise InputError(
            f"replicas are {list(replicas)}; give a count ≥ 1 for each of the {len(cuts)} stages"
        )
    if count < 1:
        raise InputError(f"num_microbatches is {count}, but must be ≥ 1")


def _check_foreseeable(optimizer: torch.optim.Optimizer) -> None:
    known = isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | torch.optim.AdamW)
    groups = optimizer.param_groups
    if not known or any(group.get("amsgrad") or group.get("maximize") for group in groups):
        raise InputError(
            f"versions.Predict cannot foresee this {type(optimizer).__name__}; take SGD, Adam or "
            "AdamW without amsgrad and maximize, or another policy"
        )
