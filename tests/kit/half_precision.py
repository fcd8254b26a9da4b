"""Mixed precision by hand on one device, with which pipelines are compared."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from penstock.engine.model import microbatches
from tests.kit.paths import ROOT


class MixedByHand:
    """Trains a model in half precision with float32 masters, gradients and sums, as anyone writes
    it; arguments are those of ``OneDevice``.

    Args:
        turns: the microbatches of each copy of a stage, in the order in which it adds them; copies
            are added in their own. By default there is one.
    """

    def __init__(
        self, model, num_microbatches, optimizer, *, loss=F.cross_entropy, scale=1.0, turns=()
    ):
        self.model, self.num_microbatches, self.loss = model, num_microbatches, loss
        self.scale, self.turns = scale, turns or [range(num_microbatches)]
        self.weights = [*model.parameters()]
        self.masters = [nn.Parameter(own.detach().float()) for own in self.weights]
        self.optimizer = optimizer(self.masters)

    def step(self, inputs, targets):
        """One minibatch; returns its loss."""
        sums, losses = [torch.zeros_like(own) for own in self.masters], {}
        parts = list(zip(*(self._cut(own) for own in (inputs, targets)), strict=True))
        for turn in self.turns:
            own = [torch.zeros_like(total) for total in sums]
            for number in turn:
                weight = len(parts[number][1]) / len(targets)
                value = self.loss(self.model(parts[number][0]), parts[number][1])
                losses[number] = value.detach().float() * weight
                gradients = torch.autograd.grad(value * (weight * self.scale), self.weights)
                for total, gradient in zip(own, gradients, strict=True):
                    total.add_(gradient.float())
            for total, term in zip(sums, own, strict=True):
                total.add_(term)
        self._update(sums)
        total = None
        for number in range(self.num_microbatches):
            total = losses[number] if total is None else total + losses[number]
        return total

    def _cut(self, value):
        return microbatches.split(value, self.num_microbatches)

    def _update(self, sums):
        with torch.no_grad():
            for master, total in zip(self.masters, sums, strict=True):
                master.grad = total / self.scale
            self.optimizer.step()
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)


def turns_of(plan) -> list[list[int]]:
    """The microbatches of each rank of a plan's first stage, in the order of its backwards."""
    ranks = plan.placement.ranks_of(0)
    return [[op.microbatch for op in _backwards(plan.placement.ranks[rank])] for rank in ranks]


def _backwards(ops) -> Iterator:
    return (op for op in ops if op.stage == 0 and op.kind.value in "BW")


def bytes_per_parameter(reducer: str, copies: int, largest_share: float) -> dict[str, float]:
    """The row of a reducer, as ``fully-sharded "use"``, in the table of bytes per parameter in
    ``docs/data-parallelism.md``."""
    page = (ROOT / "docs" / "data-parallelism.md").read_text(encoding="utf-8")
    _, _, table = page.partition(
        "| reducer | weight | gradient | master, moments |\n|---|---|---|---|\n"
    )
    for line in table.partition("\n\n")[0].splitlines():
        first, *cells = line.strip("| ").split(" | ")
        names = re.findall("`(.+?)`", first)
        names = [" ".join(names)] if names[-1].startswith('"') else names
        if reducer in names:
            known = {"__builtins__": {}, "r": copies, "l": largest_share}  # Python reads ℓ as l
            values = [eval(cell.replace("·", "*"), known) for cell in cells]
            return dict(zip(("weights", "gradients", "optimizer"), values, strict=True))
    raise AssertionError(f"the page has no row of {reducer}")


def bytes_of(tensors) -> int:
    """Of tensors with values, each piece of memory once."""
    storages = {own.untyped_storage().data_ptr(): own.untyped_storage() for own in tensors}
    return sum(storage.nbytes() for storage in storages.values())
