"""Giving values to layers on ``meta``: the same ones, however the model is spread.

A layer is made in main memory and then moved, so that its values depend on the seed and on its
number in the model, and not on stages, ranks or kinds of device; and no more than one layer at a
time is anywhere but where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.randomness import stream_seed
from penstock.model.spine import NamedLayer

_MATERIALISING = -1  # the step before the first, for seeds


def is_on_meta(module: nn.Module) -> bool:
    """Whether a module holds anything that has no values yet."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def materialise(layer: NamedLayer, index: int, seed: int) -> None:
    """Give a layer its initial values, by the ``reset_parameters`` of its modules, in main memory.
    Parameters stay the objects that they are; what has values keeps them.

    Args:
        index: the layer's number in the model.
        seed: of the whole model.

    Raises:
        ModelError: a module that holds something on ``meta`` has no ``reset_parameters``, or that
            leaves something out.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(stream_seed(seed, _MATERIALISING, 0, index))
        # Those inside first, as constructors do it.
        for name, module in reversed([*layer.module.named_modules()]):
            held = [*_held(module)]
            if any(tensor.is_meta for _, tensor in held):
                _reset(module, held, f"{layer.name}.{name}".rstrip("."))


def _reset(module: nn.Module, held: Iterable[tuple[str, Tensor]], name: str) -> None:
    kept = [(tensor, tensor.clone()) for _, tensor in held if not tensor.is_meta]
    for key, tensor in held:
        if tensor.is_meta:
            _swap(module, key, tensor)
    # torch's own attention has it as a private one.
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if not callable(reset):
        keys = ", ".join(repr(key) for key, tensor in held)
        raise ModelError(
            f"{name!r} ({type(module).__name__}) holds {keys} on the meta device and has no "
            "reset_parameters to give them values; write one, or build the model on the CPU"
        )
    reset()
    for tensor, values in kept:  # tied to a layer that was made before
        tensor.copy_(values)
    for key, tensor in _held(module):
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ModelError(
                f"reset_parameters of {name!r} ({type(module).__name__}) leaves {key!r} without "
                "values, which the meta device has not; set them there, or build the model on "
                "the CPU"
            )


def _held(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for held in (module._parameters, module._buffers):
        yield from ((key, tensor) for key, tensor in held.items() if tensor is not None)


def _swap(module: nn.Module, key: str, tensor: Tensor) -> None:
    """Memory for a tensor; not yet its values, of which NaN would tell that nobody has set them."""
    empty = torch.empty_like(tensor, device="cpu")
    if empty.is_floating_point() or empty.is_complex():
        empty.fill_(torch.nan)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
        vars(empty).update(vars(tensor))
        torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]
    else:
        module._buffers[key] = empty
