"""Models that name no spine, traced without being asked: once for all who need the layers.

``profile`` traces a model and keeps the result on the model itself, where ``Pipeline`` finds it.
Where it is not there (a plan from a file, a copy of the model, another process), the plan says with
what the model was traced, and it is traced again with such inputs. A model on ``meta`` is traced as
if it were in main memory, where models ask other things of tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from penstock.base.errors import InputError, ModelError
from penstock.base.telling import tells
from penstock.core.example import Example, Granularity
from penstock.engine.device.crossing import give_memory
from penstock.engine.model import tree
from penstock.engine.tracing.captured import Captured, capture, captured_in
from penstock.engine.tracing.inputs import inputs_like
from penstock.engine.tracing.layers import devices_of, dtypes_of
from penstock.engine.tracing.segments import called
from penstock.planning.plans import Plan

_KEPT = "_penstock_captured"


class _OnModel:
    """Holds a captured model on the model. A copy or a file of the model gets an empty one: layers
    compute with the parameters of the model that they were made of."""

    def __init__(self, captured: Captured | None = None) -> None:
        self.captured = captured

    def __deepcopy__(self, memo: Any) -> _OnModel:
        return _OnModel()

    def __reduce__(self) -> tuple[type[_OnModel], tuple[()]]:
        return _OnModel, ()


def traced_for_profile(model: nn.Module, inputs: Any) -> Captured:
    """Trace a model that is to be profiled, for sequences of any length if that can be, and keep
    the result for ``as_planned``.

    Raises:
        ModelError, InputError: as ``capture``.
    """
    # All processes of a job have the same model: the first one compares it with its layers.
    captured = _captured_for_any_length(
        model, inputs, "module", verify=os.environ.get("RANK", "0") == "0"
    )
    model.__dict__[_KEPT] = _OnModel(captured)
    return captured


def traced_on_meta(model: nn.Module, inputs: Any, granularity: Granularity) -> Captured:
    """Trace a model of which nothing will be computed, and compare nothing; nothing is kept.

    A model that trains is traced in that mode alone, which names the layers.

    Args:
        inputs: those on meta are traced as zeros.
        granularity: as of ``capture``.

    Raises:
        ModelError, InputError: as ``capture``.
    """
    zeros = tree.replace(
        torch.Tensor,
        lambda tensor: torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor,
        inputs,
    )
    modes = (True,) if model.training else (True, False)
    with off_meta(model):
        return _captured_for_any_length(model, zeros, granularity, verify=False, modes=modes)


@tells("tracing the model")
def _captured_for_any_length(
    model: nn.Module,
    inputs: Any,
    granularity: Granularity,
    *,
    verify: bool,
    modes: Sequence[bool] = (True, False),
) -> Captured:
    """Captured for sequences of any length, if there are some and that can be."""
    if _has_sequences(inputs):
        with suppress(ModelError, InputError):
            return captured_in(modes, model, inputs, granularity, "all", verify)
    return captured_in(modes, model, inputs, granularity, "rows", verify)


def _has_sequences(inputs: Any) -> bool:
    """Whether there are tokens among the inputs: the next batch may have longer ones. Pictures
    keep their size, and some models of them take minutes to trace for any."""
    return any(
        tensor.dim() > 1 and not (tensor.is_floating_point() or tensor.is_complex())
        for tensor in tree.tensors(inputs)
    )


def as_planned(model: nn.Module, plan: Plan) -> Captured | None:
    """The layers of a model that names no spine, as they were when ``plan`` was made; ``None`` if
    nobody knows how it was cut.

    Raises:
        ModelError: the model cannot be traced with the inputs of the plan, or has none of the
            layers that the plan names.
    """
    kept = model.__dict__.get(_KEPT)
    captured: Captured | None = kept.captured if isinstance(kept, _OnModel) else None
    if captured is None or not _is_for(captured, plan):
        absent = _absent(model, plan)
        if plan.example is None:
            if len(absent) == len(plan.layers):
                plan.check_model(_names(model), "")
            return None
        try:
            captured = _captured_again(model, plan.example)
        except (InputError, ModelError) as error:
            lacks = f", and has no {', '.join(absent[:5])}" * bool(absent)
            raise ModelError(
                f"the plan was made for another model, or this one has changed: "
                f"{type(model).__name__} cannot be traced with the inputs of the plan{lacks}; "
                f"profile and plan this one ({error})"
            ) from error
        model.__dict__[_KEPT] = _OnModel(captured)
    if captured.names != plan.layers and sorted(captured.names) == sorted(plan.layers):
        return captured.ordered(plan.layers)
    return captured


def _captured_again(model: nn.Module, example: Example) -> Captured:
    # Layers were compared with the model when it was profiled.
    with off_meta(model):
        return capture(
            model,
            inputs_like(example, next(iter(devices_of(model)), None)),
            granularity=example.granularity,
            dynamic=example.dynamic,
            verify=False,
        )


def _names(model: nn.Module) -> list[str]:
    """The names of the modules of a model that have no children, as its layers are called."""
    leaves = (name for name, module in model.named_modules() if not module._modules)
    return [name or type(model).__name__ for name in leaves]


def _absent(model: nn.Module, plan: Plan) -> list[str]:
    """The layers of a plan that are called as no module of a model is; functions are, too."""
    known = dict(model.named_modules(remove_duplicate=False))
    return [name for name in plan.layers if called(name) not in known]


@contextmanager
def off_meta(model: nn.Module) -> Iterator[None]:
    """A context in which what is on ``meta`` has memory on the host. No tracer reads or writes its
    values, so the system gives no pages for it."""
    tensors = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta
    }
    try:
        for tensor in tensors.values():
            give_memory(tensor, torch.empty_like(tensor, device="cpu"))
        yield
    finally:
        for tensor in tensors.values():
            if not tensor.is_meta:
                give_memory(tensor, torch.empty_like(tensor, device="meta"))


def _is_for(captured: Captured, plan: Plan) -> bool:
    same = sorted(captured.names) == sorted(plan.layers)
    return same and captured.dtypes == dtypes_of(captured)
