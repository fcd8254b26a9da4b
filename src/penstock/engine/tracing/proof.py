"""The check that a captured model computes what the model does, and the error if none was captured.

That error names the line of the model's code, and what helps.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError, ModelError
from penstock.engine.device.accelerators import generators_kept
from penstock.engine.model import microbatches, tree
from penstock.engine.model.replay import put_back, saved_buffers
from penstock.engine.tracing.graphs import UntraceableError, short
from penstock.engine.tracing.inputs import Given
from penstock.engine.tracing.lines import PAGE, TraceFailure, because, lines_of, remedy_of
from penstock.engine.tracing.unseen import (
    HookWatch,
    attributes_kept,
    check_backward,
    warn_of_attributes,
)

_MEND = (
    "The model may hold a number of rows in its code, as in `value.view(8, -1)`; write "
    "`value.shape[0]` there, or `-1`"
)

_UNSEEN = (
    "Its forward may do what tracing does not see, such as read a clock or a counter, or draw from "
    "a torch.Generator of its own; leave that out, or give the model a method `spine(self)`"
)
_BY_ROW = (
    "The code may make a number of Python of the rows, as `len(value)`, `for row in value` and "
    "`value.tolist()` do; write `value.shape[0]`, and compute with all rows at once"
)


def check_equal(
    model: nn.Module, captured: nn.Module, given: Given, calm: Collection[nn.Module]
) -> None:
    """Run a model and its capture on the inputs and on another number of rows, and compare.

    Buffers and random state are as before afterwards.

    Args:
        calm: modules that are called as they are.

    Raises:
        ModelError: the model works for one number of rows only, or the two differ, or a backward
            would.
    """
    rows = microbatches.num_rows(list(given), "inputs")
    for given_rows in (given, with_other_rows(given)):
        other = microbatches.num_rows(list(given_rows), "inputs")
        run = f"{type(model).__name__} with {other} rows"
        watch = HookWatch(calm)
        try:
            with watch, attributes_kept(model, calm) as changed:
                expected, buffers = _run(model, model, given_rows)
        except Exception as error:
            where = because(lines_of(error))
            if other == rows:
                raise ModelError(f"{run} fails: {short(error)}{where}") from error
            raise ModelError(
                f"{run} fails, where {rows} were given: {type(error).__name__}: {error}{where}. "
                f"Microbatches may be of any size. {_MEND}"
            ) from error
        try:
            output, moved = _run(model, captured, given_rows)
        except Exception as error:
            raise ModelError(
                f"{run} cannot be run layer by layer, though the model can: "
                f"{type(error).__name__}: {error}. "
                f"{_BY_ROW if isinstance(error, InputError) else _MEND}"
            ) from error
        differs = _difference(expected, output)
        if differs is None and not _all_close(buffers, moved):
            differs = "buffers, such as running statistics, differ"
        if differs is not None:
            raise ModelError(
                f"{run}, run layer by layer, is another model: {differs}. "
                f"{_UNSEEN if other == rows else f'{_MEND}; or: {_UNSEEN}'}"
            )
        if model.training:
            check_backward(type(model).__name__, expected, output, watch.line)
            if other == rows:
                warn_of_attributes(type(model).__name__, changed)


def run_alone(model: nn.Module, given: Given) -> None:
    """Run a model without a tracer, and leave its buffers and the random state as before.

    Raises whatever the model raises.
    """
    with attributes_kept(model, ()):
        _run(model, model, given)


def with_other_rows(given: Given) -> Given:
    """Inputs with a row less, or more where there are only two."""
    rows = microbatches.num_rows(list(given), "inputs")
    wanted = rows - 1 if rows > 2 else rows + 1

    def resize(tensor: Tensor) -> Tensor:
        return tensor[:wanted] if wanted < rows else torch.cat([tensor, tensor[: wanted - rows]])

    resized: Given = tree.replace(Tensor, resize, given)
    return resized


def _run(holder: nn.Module, runs: nn.Module, given: Given) -> tuple[Any, list[Tensor]]:
    """Run a module; gives its output, and the holder's buffers after that, which are put back."""
    before = saved_buffers(holder.modules())
    args, kwargs = tree.replace(Tensor, Tensor.clone, given)  # it may overwrite its inputs
    with generators_kept(tensor.device for tensor in tree.tensors(given)), torch.enable_grad():
        torch.manual_seed(0)
        try:
            output = runs(*args, **kwargs)
            return output, [buffer.clone() for buffer in holder.buffers()]
        finally:
            put_back(before)


def _difference(expected: Any, actual: Any) -> str | None:
    ours, theirs = tree.flatten(actual), tree.flatten(expected)
    if ours[1] != theirs[1]:
        return f"it returns {ours[1]} instead of {theirs[1]}"
    for position, (leaf, wanted) in enumerate(zip(ours[0], theirs[0], strict=True)):
        output = f"output {position}"
        if not isinstance(wanted, Tensor):
            if leaf != wanted:
                return f"{output} is {leaf!r} instead of {wanted!r}"
        elif leaf.shape != wanted.shape:
            return f"{output} has shape {tuple(leaf.shape)} instead of {tuple(wanted.shape)}"
        elif not _all_close([leaf], [wanted]):
            return f"{output} differs by up to {(leaf - wanted).detach().abs().max().item():.3g}"
    return None


def _all_close(actual: list[Tensor], expected: list[Tensor]) -> bool:
    # Not to the bit: while a model is traced, some choose another kernel for the same formula.
    for tensor, wanted in zip(actual, expected, strict=True):
        if not tensor.is_floating_point():
            if not torch.equal(tensor, wanted):
                return False
            continue
        scale = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
        tolerance = 1e3 * torch.finfo(tensor.dtype).eps
        if not torch.allclose(tensor, wanted, tolerance, tolerance * scale, equal_nan=True):
            return False
    return True


_SPINE = (
    f"give the model a method `spine(self)` that returns its layers in execution order (see {PAGE})"
)


def explained(model: nn.Module, given: Given, failed: UntraceableError) -> ModelError:
    """Make the error for a model that no tracer could follow; what tracers said is behind its
    ``__cause__``.

    Args:
        model: it is run on the inputs, to see whether it works at all.
        given: the inputs.
        failed: what the tracers said.
    """
    name = type(model).__name__
    own = _own_error(model, given)
    if own is not None:
        error = ModelError(
            f"{name} fails on these inputs, before anything is traced: {short(own)}"
            f"{because(lines_of(own))}. Give inputs that `model(...)` takes"
            f"{_what_it_lacks(model, given)}"
        )
        error.__cause__ = own
        return error
    lines = lines_of(failed.exported)
    remedy = remedy_of(TraceFailure(model, failed.exported, lines))
    if remedy is None:
        error = ModelError(
            f"{name} can be traced neither by torch.export ({short(failed.exported)}) nor by "
            f"torch.fx ({short(failed.symbolic)}){because(lines)}. Change that, or {_SPINE}"
        )
    else:
        error = ModelError(f"{name} cannot be traced{because(lines)}: {remedy}. Or {_SPINE}")
        # Dozens of frames of a tracer, which say less than the line.
        failed.exported.__traceback__ = None
    failed.exported.add_note(f"torch.fx: {short(failed.symbolic)}")
    error.__cause__ = failed.exported
    return error


def _own_error(model: nn.Module, given: Given) -> Exception | None:
    """The error that the model raises without any tracer; ``None`` if it works."""
    try:
        run_alone(model, given)
    except Exception as error:
        return error
    return None


def _what_it_lacks(model: nn.Module, given: Given) -> str:
    _, keywords = given
    both_sides = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True
    if both_sides and not {"labels", "decoder_input_ids", "decoder_inputs_embeds"} & {*keywords}:
        return (
            "; an encoder–decoder model takes decoder_input_ids beside input_ids, or labels, of "
            "which it makes them"
        )
    return ""
