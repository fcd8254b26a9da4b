"""What a pipeline is compared with: microbatch accumulation in plain torch, as anyone writes it."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F

from penstock.engine.model import microbatches


class OneDevice:
    """Trains a model without dropout on one device.

    The arguments are those of ``Pipeline``; ``norm`` is that of the last update, before clipping.
    """

    def __init__(
        self,
        model,
        num_microbatches,
        loss=F.cross_entropy,
        optimizer=None,
        *,
        lr_scheduler=None,
        clip_norm=None,
        grad_scaler=None,
    ):
        self.model, self.num_microbatches, self.loss = model, num_microbatches, loss
        self.optimizer = optimizer(Named(model.named_parameters())) if optimizer else None
        self.lr_scheduler = lr_scheduler(self.optimizer) if lr_scheduler else None
        self.clip_norm, self.scaler = clip_norm, grad_scaler
        self.norm = None

    def step(self, inputs, targets, *, update=True, share=1.0, autocast=None):
        """One minibatch; returns its loss."""
        inputs, targets = self.cut(inputs), self.cut(targets)
        counts = [microbatches.num_rows(part, "targets") for part in targets]
        total = None
        for part, wanted, count in zip(inputs, targets, counts, strict=True):
            weight = count / sum(counts)
            around = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
            with around:
                loss = self.loss(self.model(part), wanted)
            term = loss.detach() * weight
            total = term if total is None else total + term
            share_of_it = loss * (weight * share)
            (self.scaler.scale(share_of_it) if self.scaler else share_of_it).backward()
        if update and self.optimizer:
            self.update()
        return total

    def cut(self, value):
        if isinstance(value, microbatches.Microbatches):
            return value
        rows = microbatches.num_rows(value, "value")
        return microbatches.split(value, min(self.num_microbatches, rows))

    def update(self):
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        self.norm = torch.nn.utils.get_total_norm(gradients)
        if self.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.lr_scheduler:
            self.lr_scheduler.step()


class Named(list):
    """All parameters, as a pipeline's optimizer gets those of a stage."""

    def __init__(self, named):
        self._named = list(named)
        super().__init__(parameter for _, parameter in self._named)

    def named(self):
        return iter(self._named)


def assert_same(ours, theirs, tolerance=0.0):
    """Parameters and buffers are equal, to the bit unless a tolerance is given."""
    assert_same_values(ours.state_dict(), theirs.state_dict(), tolerance)


def assert_same_gradients(ours, theirs, tolerance=0.0):
    """Likewise the gradients."""
    ours, theirs = (
        {name: parameter.grad for name, parameter in model.named_parameters()}
        for model in (ours, theirs)
    )
    assert_same_values(ours, theirs, tolerance)


def assert_same_values(ours, theirs, tolerance=0.0):
    """Likewise tensors by name; ``None`` equals ``None`` only."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if value is None or ours[name] is None:
            assert ours[name] is value, name
            continue
        mine, other = ours[name].cpu(), value.cpu()  # pipelines may have trained on other devices
        if tolerance:
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(mine, other), name


def same(ours, theirs, tolerance=0.0):
    """Whether two numbers are equal, NaN included."""
    return torch.allclose(ours, theirs, tolerance, tolerance, equal_nan=True)
