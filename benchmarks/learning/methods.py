"""The ways of training that ``benchmarks/learning/convergence.py`` compares.

A method is a weight-version policy, an optimizer, and into how many microbatches a minibatch is
cut. An update is always made of the same samples: methods that update per microbatch get the whole
minibatch as one microbatch, methods that update per minibatch get it cut into p microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

import penstock as pk
from penstock import optimizers
from penstock.core.versions import DoubleBuffer, Flush, Latest, PipeMare, Policy, Predict, Stash
from penstock.core.versions import VerticalSync as Vertical
from penstock.engine.model.spine import spine_of

WEIGHT_DECAY = 0.01
DECAY_OF_DRIFT = 0.135
"""PipeMare's D: about exp(−2), in the middle of what its authors tried."""

Factory = Callable[[Any, float], Optimizer]


def adamw(parameters: Any, lr: float) -> Optimizer:
    """torch's, with its own defaults."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY, fused=True)


def nadamw(parameters: Any, lr: float) -> Optimizer:
    """β1 = 0.99 at every stage."""
    return optimizers.nadamw(parameters, lr, weight_decay=WEIGHT_DECAY)


def rotated(parameters: Any, lr: float) -> Optimizer:
    """Bases of both sides, renewed every 10 updates."""
    return optimizers.RotatedAdam(parameters, lr, weight_decay=WEIGHT_DECAY)


class Method(NamedTuple):
    """A row of the tables.

    Attributes:
        name: for people and files.
        policy: which weights passes read, by the number of updates of a run.
        optimizer: by parameters and learning rate.
        same_for_all: whether the number of stages makes no difference to what is learned.
    """

    name: str
    policy: Callable[[int], Policy]
    optimizer: Factory = adamw
    same_for_all: bool = False

    def microbatches(self, num_stages: int, updates: int) -> int:
        """Of a minibatch: p where it is one update, 1 where each microbatch is."""
        return num_stages if self.policy(updates).updates == "minibatch" else 1


def _pipemare(techniques: int, updates_per: Any = "microbatch") -> Callable[[int], Policy]:
    """T1 lasts for a quarter of the run, T3 for a tenth."""
    return lambda updates: PipeMare(
        t1=max(1, updates // 4),
        t2=DECAY_OF_DRIFT if techniques > 1 else None,
        t3=updates // 10 if techniques > 2 else 0,
        updates=updates_per,
    )


def always(policy: Policy) -> Callable[[int], Policy]:
    """The same policy for runs of any length."""
    return lambda updates: policy


METHODS = (
    Method("1F1B", always(Flush()), same_for_all=True),
    Method("latest", always(Latest())),
    Method("stash", always(Stash())),
    Method("vertical sync", always(Vertical())),
    Method("2BW", always(DoubleBuffer()), same_for_all=True),
    Method("PipeMare T1", _pipemare(1)),
    Method("PipeMare T1+T2", _pipemare(2)),
    Method("PipeMare T1+T2+T3", _pipemare(3)),
    Method("PipeOptim", always(Predict())),
    Method("SpecTrain", always(Predict(rule="spectrain"))),
    Method("stash, NAdamW", always(Stash()), nadamw),
    Method("stash, RotatedAdam", always(Stash()), rotated),
    Method("1F1B, NAdamW", always(Flush()), nadamw, same_for_all=True),
    Method("1F1B, RotatedAdam", always(Flush()), rotated, same_for_all=True),
    Method("PipeMare per minibatch", _pipemare(3, "minibatch")),
)
OTHERS = (Method("latest per minibatch", always(Latest(updates="minibatch"))),)
"""Trained only when named: what PipeMare is without its techniques."""
BY_NAME = {method.name: method for method in (*METHODS, *OTHERS)}


def plan_of(
    method: Method, num_stages: int, updates: int, model: torch.nn.Module | None = None
) -> pk.Plan:
    """A plan in which all layers cost the same, F = I = W, and a minibatch takes one device 24 s
    whatever it is cut into.

    Args:
        method: whose policy and microbatches.
        num_stages: p, which must divide the eight layers.
        updates: of the run.
        model: which layers; eight without a name if only time matters.
    """
    count = method.microbatches(num_stages, updates)
    graph = equal_layers(count, model)
    policy = method.policy(updates)
    plan = pk.plan(
        graph,
        pk.Cluster.local(num_stages),
        microbatches=count,
        stages=num_stages,
        schedule=None if policy.asynchronous else "1f1b",
        versions=policy,
    )
    assert {len(stage.layers) for stage in plan.stages} == {len(graph.layers) // num_stages}
    return plan


def equal_layers(num_microbatches: int, model: torch.nn.Module | None = None) -> pk.LayerGraph:
    """A graph whose layers cost the same, F = I = W, and whose minibatch takes one device 24 s.

    Args:
        num_microbatches: of a minibatch.
        model: which layers; eight without a name if only time matters.
    """
    layers = [] if model is None else spine_of(model)
    signatures = {layer.name: layer.signature for layer in layers}
    signatures = signatures or {str(number): "" for number in range(8)}
    seconds = 1 / num_microbatches
    return pk.LayerGraph(
        layers=tuple(
            pk.Layer(
                name=name,
                signature=signature,
                forward_seconds=seconds,
                backward_input_seconds=seconds,
                backward_weight_seconds=seconds,
            )
            for name, signature in signatures.items()
        )
    )


def times(method: Method, num_stages: int, updates: int) -> list[float]:
    """When each update is done in a simulated pipeline, in updates of one device; from 0.

    What PipeMare does synchronously at first counts as 1F1B with p microbatches.
    """
    plan = plan_of(method, num_stages, updates)
    flushed = plan_of(BY_NAME["1F1B"], num_stages, updates)
    policy = method.policy(updates)
    at_first = policy.t3 if isinstance(policy, PipeMare) else 0
    slow, fast = (one.step_seconds / plan.one_device_seconds for one in (flushed, plan))
    found = [0.0]
    for update in range(updates):
        found.append(found[-1] + (slow if update < at_first else fast))
    return found
