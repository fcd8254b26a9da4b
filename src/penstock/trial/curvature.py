"""The largest curvature of a loss in the weights of each stage, for ``penstock explain``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.base.errors import InputError, ModelError
from penstock.engine.device.accelerators import generators_kept
from penstock.engine.model.spine import NamedLayer, spine_fingerprint, spine_of
from penstock.engine.run.building import in_layers
from penstock.planning.plans import Plan
from penstock.training.profiler.alone import Progress
from penstock.trial.workload import Batch, Workload

_ONCE = once_differentiable(lambda *_: None).__code__
"""The code of every function that torch's decorator has marked; it leaves no other sign."""


def largest_curvature(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: Batch,
    parameters: Iterable[nn.Parameter],
    steps: int = 5,
) -> float:
    """An estimate, from below, of the largest eigenvalue of a loss's Hessian in some parameters.

    Power iteration by Hessian-vector products (Pearlmutter, "Fast Exact Multiplication by the
    Hessian", 1994), where all steps together say what the largest eigenvalue is (Lanczos), and not
    the last one alone: it needs fewer, and a large negative eigenvalue does not hide the positive
    one, which is what limits the learning rate.

    The model runs once, on the whole minibatch, in the mode it is in. Neither its buffers nor
    gradients nor torch's random generators change. Attention is computed by torch's plain formula,
    the only one that can be differentiated twice.

    Args:
        loss: from (output, targets) to a scalar.
        batch: (inputs, targets) of one minibatch.
        parameters: those to look at; frozen ones are left out, and without any the answer is 0.
        steps: Hessian-vector products, each as long as two backwards, and as many copies of the
            parameters in memory.

    Raises:
        InputError: ``steps`` is below 1.
        ModelError: an operation of the model cannot be differentiated twice, or the loss or its
            curvature is not finite.
    """
    if steps < 1:
        raise InputError(f"steps is {steps}, but must be ≥ 1")
    trained = [weight for weight in parameters if weight.requires_grad and weight.numel()]
    if not trained:
        return 0.0
    with _undisturbed(model):
        return _lanczos(_product(model, loss, batch, trained), trained, steps)


def stage_curvatures(
    workload: Workload, plan: Plan, steps: int = 5, progress: Progress | None = None
) -> list[float]:
    """``largest_curvature`` of each stage, on the first minibatch and with the first weights.

    Args:
        workload: its model, loss and minibatch.
        plan: made for its model; says which layers each stage has.
        steps: Hessian-vector products per stage.
        progress: called with (stages done, stages in all).

    Raises:
        InputError: as ``largest_curvature``, or there is no minibatch.
        ModelError: as ``largest_curvature``, or the plan is for another model.
    """
    model, batch = workload.build_model(), workload.first_batch()
    curvatures = list[float]()
    stages = layers_of_stages(model, plan)
    for layers in stages:
        parameters = {
            id(parameter): parameter for layer in layers for parameter in layer.module.parameters()
        }
        curvatures.append(
            largest_curvature(model, workload.loss, batch, parameters.values(), steps)
        )
        if progress is not None:
            progress(len(curvatures), len(stages))
    return curvatures


def layers_of_stages(model: nn.Module, plan: Plan) -> list[tuple[NamedLayer, ...]]:
    """The layers of each stage of a plan.

    Raises:
        ModelError: the plan is for another model.
    """
    layers = spine_of(in_layers(model, plan))
    plan.check_model([layer.name for layer in layers], spine_fingerprint(layers))
    borders = pairwise(accumulate((len(stage.layers) for stage in plan.stages), initial=0))
    return [tuple(layers[start:end]) for start, end in borders]


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Undo afterwards whatever forwards do to buffers and random generators."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {parameter.device for parameter in model.parameters()}
    with generators_kept(devices), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)


def _product(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: Batch,
    parameters: Sequence[nn.Parameter],
) -> Callable[[list[Tensor]], list[Tensor]]:
    """The function v ↦ Hv; all calls go through one graph, so dropout drops the same."""
    inputs, targets = batch
    value = loss(model(inputs), targets)
    if not value.isfinite():
        raise ModelError(f"the loss of the first minibatch is {float(value)}: no curvature there")
    _refuse_once(value)
    with _twice():
        slopes = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    # A parameter without a part in the loss, or with a constant one, has no curvature.
    used = [
        (slope, index)
        for index, slope in enumerate(slopes)
        if slope is not None and slope.requires_grad
    ]

    def product(vector: list[Tensor]) -> list[Tensor]:
        if not used:
            return [torch.zeros_like(part) for part in vector]
        with _twice():
            return list(
                torch.autograd.grad(
                    [slope for slope, _ in used],
                    parameters,
                    [vector[index] for _, index in used],
                    retain_graph=True,
                    materialize_grads=True,
                )
            )

    return product


@contextmanager
def _twice() -> Iterator[None]:
    """Turn torch's error about a missing second derivative into one that says what it means."""
    try:
        yield
    except RuntimeError as error:
        raise ModelError(
            f"the curvature cannot be estimated, because this model cannot be differentiated "
            f"twice: {str(error).splitlines()[0]}"
        ) from error


def _refuse_once(value: Tensor) -> None:
    """Refuse functions that say that they can be differentiated only once.

    torch raises only if the error lies on the way to what it is asked about; on the way to
    parameters, it would leave these functions' second derivatives out without a word.
    """
    seen: set[Any] = set()
    todo = [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        function = getattr(node, "_forward_cls", None)
        if function is not None and _is_once(inspect.unwrap(function.backward, stop=_is_once)):
            raise ModelError(
                "the curvature cannot be estimated, because this model cannot be differentiated "
                f"twice: {function.__name__} is once_differentiable"
            )


def _is_once(backward: Any) -> bool:
    return getattr(backward, "__code__", None) is _ONCE


def _lanczos(
    product: Callable[[list[Tensor]], list[Tensor]], like: Sequence[Tensor], steps: int
) -> float:
    """The largest Ritz value after some steps from a fixed random vector."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(part.shape, generator=generator).to(part) for part in like]
    basis = [_scaled(start, 1 / _norm(start))]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = product(basis[-1])
        diagonal.append(_dot(image, basis[-1]))
        if len(diagonal) == steps:
            break
        for _ in range(2):  # once is not enough for a basis that is orthogonal to the last digits
            for direction in basis:
                along = _dot(image, direction)
                image = [a - along * b for a, b in zip(image, direction, strict=True)]
        length = _norm(image)
        if not length > 1e-6 * max(map(abs, diagonal)):
            break  # nothing is left outside of the basis; NaN ends here, too
        beside.append(length)
        basis.append(_scaled(image, 1 / length))
    if not all(map(isfinite, diagonal)):
        raise ModelError("the curvature is not finite; start from other weights")
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        edge = torch.tensor(beside, dtype=torch.float64)
        small = small + torch.diag(edge, 1) + torch.diag(edge, -1)
    return float(torch.linalg.eigvalsh(small)[-1])


def _scaled(vector: list[Tensor], factor: float) -> list[Tensor]:
    return [part * factor for part in vector]


def _norm(vector: list[Tensor]) -> float:
    return sqrt(_dot(vector, vector))


def _dot(left: list[Tensor], right: list[Tensor]) -> float:
    pairs = zip(left, right, strict=True)
    return sum(float((a.double() * b.double()).sum()) for a, b in pairs)
