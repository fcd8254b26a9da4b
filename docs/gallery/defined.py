"""What is defined about each thing that training may have, by policy, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.versions import Policy, VerticalSync


def defined(policy: Policy) -> Iterator[tuple[str, str]]:
    """Topics, and what is to be said on each."""
    if not policy.asynchronous:
        yield from _of_one_device()
        return
    yield "Batch norm", _batch_norm(policy)
    yield (
        "Clipping",
        "`clip_stage_norm=` clips each stage by itself, at each of its updates. `clip_norm=` is "
        "refused: stages never have the gradients of one update at the same time.",
    )
    yield "Mixed precision", _mixed_precision(policy)
    yield (
        "Tied weights",
        "Refused between stages, whose gradients would be of different ages; allowed within one.",
    )
    if policy.activations == "newest":
        yield from _of_live_streams()
        return
    yield "Replicas", _replicas(policy)
    yield "Recomputation", _recomputation(policy)
    if not policy.stashes:
        yield (
            "What a backward sees",
            "What autograd saved is from the time of the forward: inputs, masks, statistics. Only "
            "parameters, and views of their memory, are looked up again when the backward asks for "
            "them. What a layer computed from its weights (a weight norm's product, a cast) is "
            "from the forward, too.",
        )
    yield (
        "Not to be had",
        "`update=False` (a stream updates as it goes), `post_validate=True` (nothing to validate), "
        "parameters with hooks or of a class of their own (versions would not have them).",
    )


def _of_live_streams() -> Iterator[tuple[str, str]]:
    yield (
        "Replicas",
        "Refused: a gradient goes through the frame that its stage has just seen. Cut the model "
        "into more stages.",
    )
    yield (
        "Recomputation",
        '`recomputing("layers")` changes nothing; `recomputing("stage")` is refused: a backward '
        "goes through what a forward has just left, so there is nothing older to make again.",
    )
    yield (
        "What a backward sees",
        "One forward's activations with the weights that made them, as on one device; only the "
        "gradient that comes in is an older frame's. So parameters may have hooks, and layers may "
        "write into theirs.",
    )
    yield (
        "State of layers",
        "What a layer carries from frame to frame, and detaches, sees each frame once, in order.",
    )
    yield (
        "Not to be had",
        "`update=False` (a stream updates as it goes), `post_validate=True` (nothing to validate).",
    )


def _of_one_device() -> Iterator[tuple[str, str]]:
    yield (
        "Everything",
        (
            "As on one device: batch norm, clipping by the global norm (`clip_norm=`) or per "
            "stage, autocast and `GradScaler`, tied weights, recomputation, accumulation over "
            "calls. [Training](../training.md) lists it."
        ),
    )
    yield (
        "Replicas",
        (
            'With 1F1B and GPipe, as in `replicas="2-1"`: microbatch k is on replica k mod r of a '
            "stage; gradients are summed before the update, and learning rates stay. Running "
            "statistics of batch norm are refused there."
        ),
    )


def _batch_norm(policy: Policy) -> str:
    text = (
        "Each microbatch is normalised by itself, and running statistics follow every microbatch "
        'in order. `batch_norm="minibatch"` is refused, because it needs a flush; so are running '
        "statistics in a stage with replicas."
    )
    if policy.stashes or policy.activations == "newest":
        return text
    return f"{text} A backward uses the statistics of its forward, and the newest scale."


def _mixed_precision(policy: Policy) -> str:
    scaler = (
        "`grad_scaler=` is refused: whether gradients are finite would have to be agreed on by all "
        "stages; bfloat16 needs none."
    )
    if policy.stashes or policy.activations == "newest":
        return f"`torch.autocast` around the loop, as always. {scaler}"
    return (
        "`torch.autocast` is refused: it makes copies of the weights, which autograd saves, so "
        f"backwards would read old ones after all. A model in bfloat16 is fine. {scaler}"
    )


def _replicas(policy: Policy) -> str:
    text = 'As in `replicas="2-1"`: microbatch k is on replica k mod r, forward and backward.'
    if isinstance(policy, VerticalSync):
        text = (
            'Every stage must have as many, as in `replicas="2-2"`: microbatch k is on replica '
            "k mod r, forward and backward."
        )
    if policy.updates == "minibatch":
        return (
            f"{text} Replicas sum their gradients before the update, so it is that of the whole "
            "minibatch, and learning rates stay."
        )
    return (
        f"{text} One microbatch of each of r replicas makes an update: their gradients are "
        "averaged, and the stage's learning rates are multiplied by r, since it makes r times "
        'fewer updates; with `reduction="sum"` they are summed, and rates stay. Delays count such '
        "updates."
    )


def _recomputation(policy: Policy) -> str:
    if policy.stashes:
        return "Changes nothing: the second forward reads the version of the first."
    return (
        "Trains otherwise than without: the second forward reads the weights of the backward's "
        'time. With `recomputing("stage")` the backward of a stage is then a gradient of one '
        "function again, though its input is older."
    )
