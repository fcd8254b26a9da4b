"""What the loss behind a head does with the logits: told by trying it on logits in parts."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from penstock.core.graph import LayerGraph
from penstock.core.layer_part import LossSees
from penstock.engine.device.accelerators import generators_kept
from penstock.engine.model import tree
from penstock.engine.model.spine import evaluation_mode, run_spine, spine_of
from penstock.engine.tensor.vocabulary import gathers_logits
from penstock.training.profiler.alone.conditions import Sample

_ROWS = 2


def with_loss_of_head(graph: LayerGraph, model: nn.Module, sample: Sample) -> LayerGraph:
    """A profile whose head says whether the sample's loss can be computed on shards of the logits.

    Args:
        graph: as it is where nothing is to be said: without a head, or a loss, or with one that the
            model computes itself.
        model: run in evaluation mode on two rows of the sample.
    """
    asked = any(part.kind == "head" and not part.loss for part in graph.layers[-1].parts)
    if not asked or sample.loss is None or getattr(model, "gives_loss", False):
        return graph
    few = sample.of(min(_ROWS, sample.num_rows))
    assert few.loss is not None
    try:
        with (
            evaluation_mode(model),
            torch.no_grad(),
            generators_kept(tensor.device for tensor in tree.tensors(few.inputs)),
        ):
            layers = [layer.module for layer in spine_of(model)]
            outputs = run_spine(layers, tree.replace(Tensor, Tensor.clone, few.inputs))
            gathers = gathers_logits(few.loss, outputs, few.targets)
    except Exception:  # a model may refuse so few rows in any way, and nobody has asked for them
        return graph
    loss: LossSees = "whole" if gathers else "shards"
    others = tuple(_with_loss(other, loss) for other in graph.other_sizes)
    return replace(_with_loss(graph, loss), other_sizes=others)


def _with_loss(graph: LayerGraph, loss: LossSees) -> LayerGraph:
    *rest, last = graph.layers
    parts = tuple(replace(part, loss=loss) if part.kind == "head" else part for part in last.parts)
    return replace(graph, layers=(*rest, replace(last, parts=parts)))
