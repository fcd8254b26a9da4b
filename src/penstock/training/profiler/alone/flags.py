"""Warnings about what is odd in a layer's measurements."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.training.profiler.alone.rounds import LayerTimes, Overheads

_WIDE = 0.15
_FAR_BELOW = 0.5


def flags_of(times: LayerTimes, trains: bool, overheads: Overheads) -> Iterator[str]:
    """A sentence for each thing about a layer that somebody should look at.

    Args:
        times: the layer's.
        trains: whether the layer has parameters that need gradients.
        overheads: what measuring a layer adds to its times.
    """
    if trains and not times.backward:
        yield "it has parameters, but no gradient comes to it"
    if times.forward + times.backward < overheads.forward.of(1) + overheads.backward.of(1):
        yield "it takes less time than measuring it does"
        return
    # What was taken off for measuring may have been too much.
    if trains and 0 < times.backward < _FAR_BELOW * times.forward - overheads.backward.of(1):
        share = times.backward / times.forward
        yield (
            f"its backward takes {share:.0%} of its forward, which is odd for a layer with "
            "parameters: is something detached?"
        )
    if times.spread > _WIDE:
        yield f"its times spread by {times.spread:.0%}: a busy machine? more repeats help"
