"""What a weight-version policy says on recomputation and replicas that others do not;
``docs/asynchronous.md`` has what holds for all of them."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.versions import Policy


def defined(policy: Policy) -> Iterator[tuple[str, str]]:
    """Topics, and what is to be said on each."""
    if not policy.asynchronous:
        yield (
            "Replicas",
            'With 1F1B and GPipe, as in `replicas="2-1"`: microbatch k is on replica k mod r of a '
            "stage; gradients are summed before the update, and learning rates stay. Running "
            "statistics of batch norm are refused there.",
        )
    elif policy.activations == "newest":
        yield from _of_live_streams()
    elif policy.stashes:
        yield "Recomputation", "Changes nothing: the second forward reads the version of the first."
    else:
        yield (
            "Recomputation",
            "Trains otherwise than without: the second forward reads the weights of the backward's "
            'time. With `recomputing("stage")` the backward of a stage is then a gradient of one '
            "function again, though its input is older.",
        )


def _of_live_streams() -> Iterator[tuple[str, str]]:
    yield (
        "Replicas",
        "Refused: a gradient goes through the frame that its stage has just seen. Cut the model "
        "into more stages.",
    )
    yield (
        "Recomputation",
        '`recomputing("layers")` changes nothing; `recomputing("stage")` is refused.',
    )
    yield (
        "State of layers",
        "Parameters may have hooks, and layers may write into theirs. What a layer carries from "
        "frame to frame, and detaches, sees each frame once, in order.",
    )
