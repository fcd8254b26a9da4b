"""``share_positions``: a model whose sequence the devices of a group share, as one of them sees it.

Each device has all weights and some of the positions, as many for all, and causal attention is
divided so that each has as much to do. In attention, keys and values go round a ring of the
devices, and backwards once more, with their gradients one device behind (Liu et al., "Ring
Attention", arXiv 2310.01889). Gradients of weights are terms of a sum, which is made once per
minibatch.
"""

from __future__ import annotations

from math import ceil

from msgspec.structs import replace

from penstock.core.cluster import Link
from penstock.core.graph import Layer, LayerGraph
from penstock.core.layer_part import LayerPart
from penstock.planning.partition.tensor import TensorSplit, beside
from penstock.planning.partition.tensor_layouts import DeviceRing, Traffic


def share_positions(
    graph: LayerGraph,
    num_context_ranks: int,
    link: Link,
    *,
    num_microbatches: int,
    speed: float = 1.0,
) -> TensorSplit:
    """How ``num_context_ranks`` devices share the sequence of a model.

    Times of communication are added to those of compute; nothing of it is taken to be hidden.

    Args:
        graph: the profile. The parts of its layers say which attend, and how many heads of keys
            and values they have; a layer without known attention is taken to send nothing.
        num_context_ranks: devices of the group, equally fast, at least 2.
        link: between any two of them.
        num_microbatches: per minibatch, at least 1.
        speed: of the devices, as ``Device`` has it; links are as fast beside any.
    """
    ring = DeviceRing(num_context_ranks, beside(link, speed), graph.microbatch_size)
    traffic = {layer.name: _rounds(layer, ring) for layer in graph.layers}
    sums = {layer.name: ring.all_reduce(layer.parameter_bytes) for layer in graph.layers}
    layers = tuple(_as_seen(layer, ring, *traffic[layer.name], sums) for layer in graph.layers)
    seconds = sum(
        num_microbatches * layer.compute_seconds + layer.update_seconds for layer in layers
    ) / speed  # fmt: skip
    per_microbatch = sum(
        there.num_bytes + back.num_bytes for there, back in traffic.values()
    )  # fmt: skip
    moved = num_microbatches * per_microbatch + sum(own.num_bytes for own in sums.values())
    moved_bytes = round(num_context_ranks * moved)
    return TensorSplit(
        splits=dict.fromkeys(traffic, "context"),
        layouts=dict.fromkeys(traffic, "sequence"),
        graph=replace(
            graph,
            layers=layers,
            input_bytes=graph.input_bytes,  # everyone is given whole inputs
            other_sizes=(),
        ),
        seconds=seconds,
        moved_bytes=moved_bytes,
        data_seconds=seconds,
        data_moved_bytes=moved_bytes,
        tensor_seconds=seconds,
        tensor_moved_bytes=moved_bytes,
        collectives={
            name: {
                "forward_seconds": there.seconds,
                "backward_input_seconds": back.seconds,
                "recompute_seconds": there.seconds,
                "update_seconds": sums[name].seconds,
            }
            for name, (there, back) in traffic.items()
        },
        speed=speed,
    )


def _rounds(layer: Layer, ring: DeviceRing) -> tuple[Traffic, Traffic]:
    """What a device sends of keys and values: forward, and backward with their gradients."""
    num_bytes = sum(map(_key_value_bytes, layer.parts)) * ring.share("sequence")
    if not num_bytes:
        return Traffic(), Traffic()
    once = Traffic(ring.link.seconds(num_bytes), num_bytes)
    forward = backward = Traffic()
    for _ in range(ring.num_ranks - 1):
        forward, backward = forward + once, backward + once + once
    return forward, backward + once


def _key_value_bytes(part: LayerPart) -> float:
    """Bytes of keys and values of a part that attends; 0 of any other."""
    is_attention = part.kind in ("attention", "block")
    if not is_attention and "column/3" not in part.splits.values():
        return 0.0
    return 2 * part.border_bytes * (part.key_value_heads or part.pieces) / part.pieces


def _as_seen(
    layer: Layer, ring: DeviceRing, forward: Traffic, backward: Traffic, sums: dict[str, Traffic]
) -> Layer:
    share = ring.share("sequence")
    again = layer.recompute_seconds

    def part(num_bytes: int) -> int:
        return ceil(num_bytes * share)

    return replace(
        layer,
        forward_seconds=layer.forward_seconds * share + forward.seconds,
        backward_input_seconds=layer.backward_input_seconds * share + backward.seconds,
        backward_weight_seconds=layer.backward_weight_seconds * share,
        split_forward_seconds=layer.split_forward_seconds * share,
        split_seconds=layer.split_seconds * share,
        recompute_seconds=None if again is None else again * share + forward.seconds,
        collective_seconds=forward.seconds + backward.seconds,
        update_seconds=layer.update_seconds + sums[layer.name].seconds,
        activation_bytes=part(layer.activation_bytes - layer.mask_bytes),
        loss_bytes=part(layer.loss_bytes),
        mask_bytes=0,
        held_input_bytes=part(layer.held_input_bytes),
        weight_kept_bytes=part(layer.weight_kept_bytes),
        workspace_bytes=part(layer.workspace_bytes),
        output_bytes=part(layer.output_bytes),
        skip_bytes={name: part(size) for name, size in layer.skip_bytes.items()},
    )
