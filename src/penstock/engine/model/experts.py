"""The experts of a mixture, found by the structure of modules: what ranks can divide among them.

A module of experts is given tokens, which experts each of them goes to, and with what weights, and
gives the sum of what these experts make of it. Its weights are stacked, expert by expert, or it is
a list of one module per expert; the router is a module of its own. So are those of Mixtral and the
Qwen mixtures in ``transformers``, and anybody's own::

    class Experts(nn.Module):
        def __init__(self, width, num_experts):
            super().__init__()
            self.num_experts = num_experts
            self.up = nn.Parameter(torch.randn(num_experts, 4 * width, width))
            self.down = nn.Parameter(torch.randn(num_experts, width, 4 * width))

        def forward(self, tokens, expert_index, expert_weights):
            ...  # (tokens × width), twice (tokens × choices) → (tokens × width)

Modules whose arguments have other names say ``divides_experts = True``.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError, ModelError
from penstock.base.values import is_whole

_INDEX_WORDS = ("ind", "expert")
_WEIGHT_WORDS = ("weight", "score", "prob")
_DECLARED = "divides_experts"
_NUM_ARGUMENTS = 3


class FoundExperts(NamedTuple):
    """The experts of one mixture.

    Attributes:
        path: the module's name in what it was looked for.
        module: gives the sum of what experts make of each token.
        num_experts: how many there are.
        is_list: whether it has a module for each; otherwise each of its weights has a row for each.
    """

    path: str
    module: nn.Module
    num_experts: int
    is_list: bool

    @property
    def num_bytes(self) -> int:
        """The size of all experts' weights."""
        return sum(weight.nbytes for weight in self.module.parameters())


def experts_in(module: nn.Module) -> list[FoundExperts]:
    """The experts of all mixtures in a module, in the order of its modules.

    Raises:
        ModelError: a module says ``divides_experts``, and nothing in it can be divided.
    """
    mixtures: list[FoundExperts] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{outer.path}.") for outer in mixtures):
            continue
        own = _experts(path, child)
        if own is not None:
            mixtures.append(own)
    return mixtures


def has_experts(module: nn.Module) -> bool:
    """Whether a module is the experts of a mixture."""
    return _experts("", module) is not None


def _experts(path: str, module: nn.Module) -> FoundExperts | None:
    is_declared = bool(getattr(module, _DECLARED, False))
    if not is_declared and not _takes_routes(module):
        return None
    is_list = isinstance(module, nn.ModuleList)
    count = getattr(module, "num_experts", len(module) if isinstance(module, nn.ModuleList) else 0)
    own = list(module.parameters(recurse=False))
    below = sum(1 for child in module.children() for _ in child.parameters())
    is_whole_list = is_list and len(list(module.children())) == count and not own and bool(below)
    is_stacked = bool(own) and not below and all(w.dim() and w.shape[0] == count for w in own)
    if is_whole(count) and count > 1 and (is_whole_list or is_stacked):
        return FoundExperts(path, module, int(count), is_list)
    if not is_declared:
        return None
    raise ModelError(
        f"{type(module).__name__} says {_DECLARED}, but is neither a list of num_experts modules "
        "nor has num_experts rows in each of its own parameters; give it num_experts ≥ 2 and one "
        "of these forms"
    )


def _takes_routes(module: nn.Module) -> bool:
    """Whether a forward takes tokens, the numbers of their experts, and the weights of these."""
    try:
        signature = inspect.signature(type(module).forward)
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, own in signature.parameters.items() if own.kind in kinds][1:]
    if len(names) != _NUM_ARGUMENTS:
        return False
    return any(word in names[1] for word in _INDEX_WORDS) and any(
        word in names[2] for word in _WEIGHT_WORDS
    )


def tokens_per_expert(expert_index: Tensor, num_experts: int) -> Tensor:
    """How many tokens go to each expert; those that are dropped go to none.

    Args:
        expert_index: the numbers of experts, in any shape; of those that are dropped,
            ``num_experts`` or more.
    """
    return torch.bincount(expert_index.reshape(-1), minlength=num_experts)[:num_experts]


def within_capacity(expert_index: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Routes of which no expert gets more than its capacity: the first choices of tokens come
    first, in the order of the tokens, then the second ones; all further ones are dropped.

    What is dropped has the number ``num_experts``, which experts pass over, here as in
    ``transformers``. The rule sees one microbatch, so it is the same however experts are divided.

    Args:
        expert_index: the experts of each token (tokens × choices), whole numbers.
        num_experts: how many there are.
        capacity: how many tokens of a microbatch each takes at most, at least 1.

    Returns:
        As ``expert_index``.

    Raises:
        InputError: a capacity below 1, or an index of another shape.

    >>> within_capacity(torch.tensor([[0, 1], [0, 1], [0, 1]]), 2, 2).tolist()
    [[0, 1], [0, 1], [2, 2]]
    """
    if not is_whole(capacity) or capacity < 1:
        raise InputError(f"capacity is {capacity!r}, but must be a whole number ≥ 1")
    if expert_index.dim() != 2:
        raise InputError(
            f"expert_index has shape {tuple(expert_index.shape)}; give (tokens × choices)"
        )
    chosen = expert_index.t().reshape(-1)  # first choices before second ones
    ordered = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=num_experts)
    firsts = torch.cumsum(counts, 0) - counts
    place = torch.empty_like(chosen)
    place[ordered] = torch.arange(len(chosen), device=chosen.device) - firsts[chosen[ordered]]
    kept = torch.where(place < capacity, chosen, num_experts)
    return kept.view(expert_index.shape[1], -1).t().contiguous()
