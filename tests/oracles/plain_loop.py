"""Training on one device, as anyone would write it: a loop over microbatches and layers."""

from __future__ import annotations

import contextlib
import hashlib

import torch

from tests.oracles import nets


def seed_of(seed, step, microbatch, layer):
    """The seed from which one layer draws for one microbatch, as docs/training.md states it."""
    digest = hashlib.blake2b(f"{seed}/{step}/{microbatch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def forward(layers, value, draws, call=nets.run):
    """Run layers in turn; before each, the default generator is seeded by ``draws(layer)``."""
    skips = {}
    for index, layer in enumerate(layers):
        torch.manual_seed(draws(index))
        value = call(layer, value, skips)
    return value


class PlainLoop:
    """Trains a net by accumulation.

    Args:
        net: trained in place.
        num_microbatches: at most so many per minibatch.
        loss: from (outputs, targets), a mean over rows.
        optimizer, scheduler: factories.
        seed: of dropout.
        clip_norm: of all gradients.
        scaler: a ``GradScaler``.
        autocast: a dtype.
    """

    def __init__(
        self,
        net,
        num_microbatches,
        loss,
        optimizer,
        *,
        scheduler=None,
        seed=0,
        clip_norm=None,
        scaler=None,
        autocast=None,
    ):
        self.net, self.num_microbatches, self.loss, self.seed = net, num_microbatches, loss, seed
        self.optimizer = optimizer(list(net.parameters()))
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.clip_norm, self.scaler, self.autocast = clip_norm, scaler, autocast
        self.number = 0

    def step(self, inputs, targets, *, update=True, share=1.0):
        """Train on one minibatch; its loss."""
        count, rows = min(self.num_microbatches, len(targets)), len(targets)
        total = None
        cut = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        for microbatch, (part, wanted) in enumerate(cut):
            loss = self._loss_of(part.clone(), wanted, microbatch)
            term = loss * (len(wanted) / rows)
            total = term.detach() if total is None else total + term.detach()
            scaled = self.scaler.scale(term * share) if self.scaler else term * share
            scaled.backward()
        self.number += 1
        if update:
            self._update()
        return total

    def _loss_of(self, part, wanted, microbatch):
        layers = self.net.spine()
        around = torch.autocast("cpu", self.autocast) if self.autocast else contextlib.nullcontext()
        with around:
            output = forward(
                layers, part, lambda layer: seed_of(self.seed, self.number, microbatch, layer)
            )
            return self.loss(output, wanted)

    def _update(self):
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler:
            self.scheduler.step()
