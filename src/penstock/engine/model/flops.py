"""How many floating-point operations a model is: forward and backward, on tensors without values.

torch's ``FlopCounterMode`` hooks every module of the process, the ranks' at work as well, and knows
no attention of a CPU. What is used here is its table of formulas.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from penstock.engine.model import tree
from penstock.engine.model.modes import Args, DispatchMode, Named
from penstock.engine.model.spine import run_spine

_META = torch.device("meta")


def without_values(value: Any) -> Any:
    """A value with tensors on meta in the place of its tensors."""
    return tree.replace(Tensor, lambda tensor: torch.empty_like(tensor, device=_META), value)


def count_flops(modules: Sequence[nn.Module], inputs: Any) -> int | None:
    """The floating-point operations of one forward and one backward through the layers of a model.

    A multiplication and an addition are two. Matrix products, convolutions and attention count, as
    torch counts them; a loss behind the layers does not, nor what recompute does again.

    Args:
        modules: in execution order, as ``run_spine`` takes them. Copies without values are run, so
            nothing is left on them, and they may be at work meanwhile.
        inputs: of the first one; on meta will do.

    Returns:
        ``None`` where layers need values: they look into tensors, or cannot be copied.
    """
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device(_META),
            _FlopCounter() as counter,
        ):
            copies = _copies(modules)
            outputs = run_spine(copies, without_values(inputs))
            weights = {weight for module in copies for weight in module.parameters()}
            ends = [leaf for leaf in tree.tensors(outputs) if leaf.requires_grad]
            learning = [weight for weight in weights if weight.requires_grad]
            if ends and learning:
                seeds = [torch.ones_like(end) for end in ends]
                torch.autograd.grad(ends, learning, seeds, allow_unused=True)
    except Exception:  # a layer may want values in any way
        return None
    return int(counter.flops)


def _copies(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Copies of layers, whose parameters and buffers have no values; tied ones stay tied.

    Parameters clone themselves, which within a ``_FlopCounter`` gives clones on meta, also where a
    rank at work has just exchanged one for another version. Buffers would copy their memory, so
    they are given.
    """
    buffers = [buffer for module in modules for buffer in module.buffers()]
    memo: dict[int, Any] = {id(buffer): without_values(buffer) for buffer in buffers}
    copies = [copy.deepcopy(module, memo) for module in modules]
    del buffers  # not before: another tensor would have the number of one that is gone
    return copies


class _FlopCounter(DispatchMode):
    """Adds up what each operation of this thread takes, and keeps all of them on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def call(self, func: Any, args: Args, named: Named) -> Any:
        # What a captured layer makes where it was captured, or holds beside its weights.
        args = tree.replace(Tensor, _on_meta, args)
        named = tree.replace(Tensor, _on_meta, named)
        if "device" in named:
            named["device"] = _META
        result = func(*args, **named)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **named, out_val=result)
        return result


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.device == _META else torch.empty_like(tensor, device=_META)
