"""The check that a captured model computes what the model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model import microbatches, tree
from penstock.model.replay import put_back, saved_buffers
from penstock.tracing.graphs import Given

_MEND = (
    "The model may hold a number of rows in its code, as in `value.view(8, -1)`; write "
    "`value.shape[0]` there, or `-1`"
)


def check_equal(model: nn.Module, captured: nn.Module, given: Given) -> None:
    """Run both in their modes on the inputs, and on another number of rows.

    Buffers and random state are as before afterwards.

    Raises:
        ModelError: the model works for one number of rows only, or the two differ.
    """
    rows = microbatches.num_rows(list(given), "inputs")
    for other in (rows, rows - 1 if rows > 2 else rows + 1):
        given_rows = given if other == rows else _resized(given, rows, other)
        what = f"{type(model).__name__} with {other} rows"
        try:
            expected, buffers = _run(model, model, given_rows)
        except Exception as error:
            raise ModelError(
                f"{what} fails, where {rows} were given: {type(error).__name__}: {error}. "
                f"Microbatches may be of any size. {_MEND}"
            ) from error
        try:
            found, moved = _run(model, captured, given_rows)
        except Exception as error:
            raise ModelError(
                f"{what} cannot be run layer by layer, though the model can: "
                f"{type(error).__name__}: {error}. {_MEND}"
            ) from error
        differs = _difference(expected, found)
        if differs is None and not _all_close(buffers, moved):
            differs = "buffers, such as running statistics, differ"
        if differs is not None:
            raise ModelError(
                f"{what}, run layer by layer, is another model: {differs}. {_MEND}; or it does "
                "what tracing does not see; give it a method `spine(self)`"
            )


def _resized(given: Given, rows: int, wanted: int) -> Given:
    def resize(tensor: Tensor) -> Tensor:
        return tensor[:wanted] if wanted < rows else torch.cat([tensor, tensor[: wanted - rows]])

    resized: Given = tree.replace(Tensor, resize, given)
    return resized


def _run(holder: nn.Module, runs: nn.Module, given: Given) -> tuple[Any, list[Tensor]]:
    """What a module returns, and what has become of the holder's buffers; undone afterwards."""
    before = saved_buffers(holder.modules())
    args, kwargs = tree.replace(Tensor, Tensor.clone, given)  # it may overwrite its inputs
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        try:
            output = runs(*args, **kwargs)
            return output, [buffer.clone() for buffer in holder.buffers()]
        finally:
            put_back(before)


def _difference(expected: Any, found: Any) -> str | None:
    ours, theirs = tree.flatten(found), tree.flatten(expected)
    if ours[1] != theirs[1]:
        return f"it returns {ours[1]} instead of {theirs[1]}"
    for at, (one, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if not isinstance(other, Tensor):
            if one != other:
                return f"output {at} is {one!r} instead of {other!r}"
        elif one.shape != other.shape:
            return f"output {at} has shape {tuple(one.shape)} instead of {tuple(other.shape)}"
        elif not _all_close([one], [other]):
            return f"output {at} differs by up to {(one - other).detach().abs().max().item():.3g}"
    return None


def _all_close(ones: list[Tensor], others: list[Tensor]) -> bool:
    # Not to the bit: while a model is traced, some choose another kernel for the same formula.
    for one, other in zip(ones, others, strict=True):
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return False
            continue
        scale = float(other.detach().abs().max()) if other.numel() else 0.0
        tolerance = 1e3 * torch.finfo(one.dtype).eps
        if not torch.allclose(one, other, tolerance, tolerance * scale, equal_nan=True):
            return False
    return True
