"""Batch norm whose running statistics are those of whole minibatches.

Layers normalise with the statistics of a microbatch; that is what cutting a minibatch changes, and
nothing can undo it without waiting for all microbatches. The running statistics, with which the
model is evaluated later, need no such compromise: counts, means and squared deviations of the
microbatches are combined, and the layer's buffers move once per minibatch, as on one device. (So
does GPipe: Huang et al., 2019, section 3.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.base.errors import InputError


class MinibatchStatistics:
    """Gathers statistics of batch norm layers over the microbatches of a minibatch.

    From construction to ``close``, forwards in training mode leave a layer's buffers alone and
    gather instead; ``commit`` then moves them once. Evaluation mode is untouched, and so are layers
    without running statistics. A layer that runs several times per microbatch is treated as if it
    had run once on the rows of all its runs. While a gathering layer runs, its
    ``track_running_stats`` is off: no two threads may run one at the same time.

    Use one per rank. During whatever runs forwards again (recomputation, and backwards if the model
    uses ``torch.utils.checkpoint``), it must be ``paused``.

    Args:
        modules: layers, or modules that contain some.

    Attributes:
        layers: those whose statistics are gathered, each once.

    Raises:
        InputError: there is a ``SyncBatchNorm``, whose statistics span processes.

    >>> layer = nn.BatchNorm1d(1, momentum=0.5)
    >>> statistics = MinibatchStatistics([layer])
    >>> for rows in ([[0.0], [2.0]], [[4.0], [6.0], [8.0]]):
    ...     normalised = layer(torch.tensor(rows))
    >>> statistics.commit()
    >>> layer.running_mean.item(), layer.running_var.item()
    (2.0, 5.5)
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = tuple(dict.fromkeys(_tracking_layers(modules)))
        self._paused = False
        self._gathered: dict[_BatchNorm, _ChannelMoments] = {}
        # No hooks: copies of a module, of which other threads run one each, share those.
        self._forwards = [(layer, vars(layer).get("forward")) for layer in self.layers]
        for layer in self.layers:
            layer.forward = partial(self._run, layer, layer.forward)  # type: ignore[method-assign]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While active, forwards neither move running statistics nor are counted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def commit(self) -> None:
        """Move the running statistics once, by all that was gathered since the last time.

        Layers that did not run in training mode stay as they are.
        """
        for layer, moments in self._gathered.items():
            _move(layer, moments)
        self._gathered.clear()

    def forget(self) -> None:
        """Drop the statistics that were gathered, after a failed step."""
        self._gathered.clear()

    def close(self) -> None:
        """Let the layers work as they did before; what was gathered is dropped."""
        for layer, forward in self._forwards:
            del layer.forward
            if forward is not None:
                layer.forward = forward  # type: ignore[method-assign]
        self._forwards.clear()
        self.forget()

    def _run(
        self, layer: _BatchNorm, forward: Callable[[Tensor], Tensor], inputs: Tensor
    ) -> Tensor:
        if not layer.training or not layer.track_running_stats:
            return forward(inputs)
        # Without tracking, a layer in training normalises alike but does not know its buffers;
        # a momentum of 0 would still let NaN and infinity into them.
        layer.track_running_stats = False
        try:
            output = forward(inputs)
        finally:
            layer.track_running_stats = True
        if not self._paused:
            moments = _ChannelMoments.of(inputs)
            before = self._gathered.get(layer)
            self._gathered[layer] = moments if before is None else before.joined(moments)
        return output


class _ChannelMoments:
    """Count, mean and sum of squared deviations per channel, in float64."""

    __slots__ = ("count", "deviations", "mean")

    def __init__(self, count: int, mean: Tensor, deviations: Tensor) -> None:
        self.count = count
        self.mean = mean
        self.deviations = deviations

    @classmethod
    def of(cls, inputs: Tensor) -> _ChannelMoments:
        """Those of ``[rows, channels, …]``."""
        with torch.no_grad():
            values = inputs if inputs.dtype == torch.float64 else inputs.float()
            others = [dimension for dimension in range(inputs.dim()) if dimension != 1]
            variance, mean = torch.var_mean(values, others, correction=0)
            count = inputs.numel() // inputs.shape[1]
            return cls(count, mean.double(), variance.double() * count)

    def joined(self, other: _ChannelMoments) -> _ChannelMoments:
        """The moments of both together: Chan, Golub and LeVeque, 1983, which cancels no digits."""
        count = self.count + other.count
        shift = other.mean - self.mean
        mean = self.mean + shift * (other.count / count)
        between = shift.square() * (self.count * other.count / count)
        return _ChannelMoments(count, mean, self.deviations + other.deviations + between)


def _move(layer: _BatchNorm, moments: _ChannelMoments) -> None:
    """Do to a layer's buffers what one forward on the whole minibatch does."""
    mean, variance, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if mean is None or variance is None:
        return
    if tracked is not None:
        tracked.add_(1)
    factor = layer.momentum
    if factor is None:  # a cumulative average
        factor = 1 / int(tracked) if tracked is not None else 0.0
    unbiased = moments.deviations / (moments.count - 1)
    for buffer, new in ((mean, moments.mean), (variance, unbiased)):
        buffer.copy_((1 - factor) * buffer.double() + factor * new)


def _tracking_layers(modules: Iterable[nn.Module]) -> Iterator[_BatchNorm]:
    for module in modules:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise InputError(
                    f"layer {name or 'itself'!r} of {type(module).__name__} is a SyncBatchNorm, "
                    "which exchanges its statistics between processes in every forward; use "
                    "nn.BatchNorm, or leave its statistics to microbatches"
                )
            if isinstance(layer, _BatchNorm) and layer.track_running_stats:
                yield layer
