"""Training with old weights, literally: which version each pass reads is a formula of a paper.

Microbatches go through all stages one after the other. Every stage keeps every version of its
weights that ever was, a forward reads the one that its formula names, and each stage steps its own
optimizer on its newest weights.
"""

from __future__ import annotations

import itertools

from tests.oracles.plain_loop import forward, seed_of


def stash(microbatch, stage, num_stages, per_update):
    """PipeDream (SOSP 2019, section 3.3): the newest when the microbatch came to the stage."""
    return max(0, microbatch - (num_stages - 1 - stage)) // per_update


def vertical_sync(microbatch, stage, num_stages, per_update):
    """PipeDream with vertical sync: at every stage the newest when it came to the first."""
    return max(0, microbatch - (num_stages - 1)) // per_update


def double_buffer(microbatch, stage, num_stages, per_update):
    """PipeDream-2BW (arXiv 2006.09503, section 3.1): that of the update before the last."""
    return max(0, microbatch // per_update - 1)


class PlainReplay:
    """Trains a net with versions of weights.

    Args:
        net: trained in place.
        borders: the first layer of each stage, and the number of layers.
        version: of (microbatch, stage, number of stages, microbatches per update), the forward's.
        stashes: whether the backward reads the forward's version; otherwise the newest.
        num_microbatches: per minibatch.
        updates: ``"microbatch"`` or ``"minibatch"``.
        loss, optimizer, seed: as for ``PlainLoop``; the optimizer is one per stage.
    """

    def __init__(
        self, net, borders, version, *, stashes, num_microbatches, updates, loss, optimizer, seed=0
    ):
        self.net, self.version, self.stashes, self.loss = net, version, stashes, loss
        self.num_microbatches, self.seed = num_microbatches, seed
        self.per_update = num_microbatches if updates == "minibatch" else 1
        layers = net.spine()
        self.num_stages = len(borders) - 1
        spans = [layers[first:last] for first, last in itertools.pairwise(borders)]
        self.weights = [[w for layer in span for w in layer.parameters()] for span in spans]
        self.optimizers = [optimizer(own) if own else None for own in self.weights]
        self.versions = [[[w.detach().clone() for w in own]] for own in self.weights]

    def train(self, minibatches):
        """Train on a stream; minibatches have a row or more for each microbatch. The losses."""
        losses, microbatch = [], 0
        for step, (inputs, targets) in enumerate(minibatches):
            total = None
            cut = zip(
                inputs.tensor_split(self.num_microbatches),
                targets.tensor_split(self.num_microbatches),
                strict=True,
            )
            for number, (part, wanted) in enumerate(cut):
                share = len(wanted) / len(targets)
                factor = share if self.per_update > 1 else 1.0
                loss = self._pass(microbatch, part.clone(), wanted, (step, number), factor)
                total = loss * share if total is None else total + loss * share
                microbatch += 1
                if microbatch % self.per_update == 0:
                    self._update()
            losses.append(total)
        return losses

    def _pass(self, microbatch, part, wanted, drawn, factor):
        """Forward and backward of one microbatch; gradients are added to ``.grad``."""
        newest = [versions[-1] for versions in self.versions]
        for stage, versions in enumerate(self.versions):
            read = self.version(microbatch, stage, self.num_stages, self.per_update)
            self._put(stage, versions[read])
        output = forward(self.net.spine(), part, lambda layer: seed_of(self.seed, *drawn, layer))
        loss = self.loss(output, wanted)
        if not self.stashes:
            for stage, values in enumerate(newest):
                self._put(stage, values)
        (loss * factor).backward()
        for stage, values in enumerate(newest):
            self._put(stage, values)
        return loss.detach()

    def _put(self, stage, values):
        # Through .data, autograd does not notice: what a backward saved of a weight is then new.
        for weight, value in zip(self.weights[stage], values, strict=True):
            weight.data.copy_(value)

    def _update(self):
        for optimizer, own, versions in zip(
            self.optimizers, self.weights, self.versions, strict=True
        ):
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            versions.append([weight.detach().clone() for weight in own])
