"""One stage of a replay: its newest weights, all versions of them, and what updates them.

The other half of ``delayed_replay``, which says which version each pass reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.base.errors import InputError, ModelError
from penstock.core.summation.tree import SumTree
from penstock.core.versions import PipeMare, Place, Policy, Predict
from penstock.engine.model.optimizer_factory import OptimizerFactory, Parameters, SchedulerFactory
from penstock.engine.model.spine import NamedLayer, Skip, run_layer
from penstock.trial.reference.single_device import folded

Tensors = dict[str, Tensor]


class _Version(NamedTuple):
    """A stage after some update; each dictionary has the parameters' names as keys.

    Attributes:
        weights: the stage's weights.
        drift: PipeMare's δ.
        optimizer: the optimizer's state of each parameter, and the settings of its group.
    """

    weights: Tensors
    drift: Tensors
    optimizer: dict[str, dict[str, Any]]


class ReplayedStage(nn.Module):
    """One stage: its newest weights, which are the model's, and all versions of the stream."""

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        first_layer: int,
        place: Place,
        tree: SumTree,
        policy: Policy,
    ) -> None:
        super().__init__()
        self.modules_used = nn.ModuleList(layer.module for layer in layers)
        self._layers = list(enumerate(layers, first_layer))
        self._place = place
        self._tree = tree
        self._replicas = len(tree.ranks)
        self._policy = policy
        self._own = dict(self.named_parameters())
        self._places = _places(self)
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self._drift = {name: torch.zeros_like(weight) for name, weight in self._newest().items()}
        self._asynchronous_updates = 0
        self._versions: list[_Version] = []
        self._gradients: list[tuple[int, Mapping[str, Tensor | None]]] = []

    def take_optimizer(
        self,
        names: dict[int, str],
        optimizer: OptimizerFactory,
        lr_scheduler: SchedulerFactory | None,
        averages: bool,
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
        place, delay = self._place, self._policy.delay(self._place)
        pairs = tuple(named.items())
        made = optimizer(Parameters(pairs, place.stage, place.num_stages, delay))
        if isinstance(self._policy, Predict):
            _check_foreseeable(made)
        if self._policy.updates == "microbatch" and self._replicas > 1 and averages:
            for group in made.param_groups:
                for rate in {"lr", "initial_lr"} & group.keys():
                    group[rate] = group[rate] * self._replicas
        self._optimizer = made
        self._scheduler = lr_scheduler(made) if lr_scheduler else None

    def run(
        self, copies: Tensors, value: Any, skips: dict[str, Skip], draw: Callable[..., Any]
    ) -> Any:
        """Run all layers with copies in the place of the model's weights."""
        # Told to care for ties itself, torch leaves a copy in a module that stands in two places.
        held = {place: copies[name] for place, name in self._places.items()}
        return functional_call(self, held, (value, skips, draw), tie_weights=False)

    def forward(self, value: Any, skips: dict[str, Skip], draw: Callable[..., Any]) -> Any:
        """Run all layers with the weights that they hold."""
        for index, layer in self._layers:
            run = partial(run_layer, layer, skips=skips)
            value = draw(index, layer.module.training, run, value)
        return value

    def begin(self) -> None:
        """Begin a new stream: what the weights are now is version 0."""
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
        """The weights that a forward of this version reads, as leaves of a graph of its own."""
        then = self._versions[version]
        weights = then.weights
        if isinstance(policy, Predict):
            weights = _foreseen(then, policy.forward_steps(self._place))
        return {
            name: nn.Parameter(weights[name].clone(), requires_grad=parameter.requires_grad)
            for name, parameter in self._own.items()
        }

    def backward_weights(self, policy: Policy, version: int) -> Tensors:
        """The weights that a backward of this version reads."""
        then = self._versions[version]
        if isinstance(policy, Predict):
            return _foreseen(then, policy.backward_steps(self._place))
        if isinstance(policy, PipeMare) and policy.t2 is not None:
            tau = policy.tau(self._place)
            return {name: weight - tau * then.drift[name] for name, weight in then.weights.items()}
        return then.weights

    def gather(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Keep the gradients of a microbatch until the update."""
        self._gradients.append((self._tree.ranks[microbatch % self._replicas], gradients))

    def update(self, policy: Policy, averages: bool, clip_norm: float | None) -> None:
        """Apply the gathered gradients, which makes one more version."""
        for name, parameter in self._own.items():
            sums = {rank: self._of_rank(rank, name) for rank in self._tree.ranks}
            total = folded(self._tree, sums)
            if total is not None and averages:
                total = total / len(self._gradients)
            parameter.grad = total
        self._gradients = []
        self._change(policy, clip_norm)

    def apply_all(self, contributions: Sequence[Sequence[Mapping[str, Tensor | None]]]) -> None:
        """Apply gradients, which makes one more version.

        Args:
            contributions: in the order in which they are added, each the gradients of the
                microbatches that are added first.
        """
        for name, parameter in self._own.items():
            parameter.grad = _sum(
                _sum(gradients[name] for gradients in own) for own in contributions
            )
        self._change(self._policy, None)

    def _change(self, policy: Policy, clip_norm: float | None) -> None:
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self._own.values(), clip_norm)
        if self._optimizer is not None:
            self._step(self._optimizer, policy)
            self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
        self._follow_drift()
        self._versions.append(self._snapshot())

    def _of_rank(self, rank: int, name: str) -> Tensor | None:
        return _sum(own[name] for owner, own in self._gradients if owner == rank)

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
    """The name of the parameter at every place in which some module holds one."""
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    return {
        f"{prefix}.{name}": names[id(parameter)]
        for prefix, module in stage.named_modules()  # each module once
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def _foreseen(version: _Version, steps: int) -> Tensors:
    """w − σ·lr·direction, with the optimizer as it was at that version."""
    weights = dict(version.weights)
    for name, kept in version.optimizer.items():
        direction = _direction(weights[name], kept)
        if direction is not None and steps:
            weights[name] = weights[name] - steps * float(kept["lr"]) * direction
    return weights


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


def _check_foreseeable(optimizer: torch.optim.Optimizer) -> None:
    known = isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | torch.optim.AdamW)
    groups = optimizer.param_groups
    if not known or any(group.get("amsgrad") or group.get("maximize") for group in groups):
        raise InputError(
            f"versions.Predict cannot foresee this {type(optimizer).__name__}; take SGD, Adam or "
            "AdamW without amsgrad and maximize, or another policy"
        )
