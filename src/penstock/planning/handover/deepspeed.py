"""Plans in the words of DeepSpeed: its pipeline as Python, with one layer per stage, and its
config."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from penstock.base.errors import InputError
from penstock.base.values import encode, shown
from penstock.core.graph import LayerGraph
from penstock.planning.handover.degrees import degrees_of, head_of, notes_of, rows_of
from penstock.planning.handover.described import (
    ConfigFields,
    Described,
    copies_of,
    fields_of,
)
from penstock.planning.handover.written import Lines
from penstock.planning.plans import Plan

_MODULE = '''"""{head}: the model as one layer for each stage.

    net = pipeline_module(model, loss_fn=loss)
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config="ds_config.json"
    )
"""

from torch import nn
from torch.utils.checkpoint import checkpoint
from deepspeed.pipe import LayerSpec, PipelineModule

STAGES = {stages}
RECOMPUTE = {recompute}


class Stage(nn.Sequential):
    """Modules one after the other; "layers" or "stage" runs again before its backward."""

    def __init__(self, modules, recompute):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name.replace(".", "/"), module)
        self.recompute = recompute

    def forward(self, value):
        if self.recompute == "stage":
            return checkpoint(super().forward, value, use_reentrant=False)
        for module in self:
            again = self.recompute == "layers"
            value = checkpoint(module, value, use_reentrant=False) if again else module(value)
        return value


def pipeline_module(model, **options):
    """The model, whose modules follow one another, cut as the plan says. Names of weights are
    those of the model's with a stage's number in front and / for the dots of layers."""
    specs = [
        LayerSpec(Stage, {{name: model.get_submodule(name) for name in names}}, recompute)
        for names, recompute in zip(STAGES, RECOMPUTE, strict=True)
    ]
    return PipelineModule(specs, num_stages=len(specs), partition_method="uniform", **options)
'''


def write(plan: Plan) -> Lines:
    """The lines that make a ``PipelineModule``, and the config's batch sizes and ZeRO stage."""
    degrees = degrees_of(plan)
    text = _MODULE.format(
        head=head_of("deepspeed"),
        stages=rows_of(stage.layers for stage in plan.stages),
        recompute=rows_of(stage.recompute for stage in plan.stages),
    )
    config = {
        "train_batch_size": degrees.local_batch_size * degrees.data,
        "train_micro_batch_size_per_gpu": degrees.microbatch_size,
        "gradient_accumulation_steps": degrees.microbatches,
        "zero_optimization": {"stage": 1 if degrees.is_sharded else 0},
    }
    files = {"deepspeed_plan.py": text, "ds_config.json": encode(config) + "\n"}
    return Lines(files, notes_of(plan, "deepspeed"))


_FIELDS = frozenset((
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "stage",
    "stages", "num_stages", "partition_method", "activation_checkpoint_interval",
    "zero_optimization",
))  # fmt: skip
_OTHERS = ("max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu")


def read(config: object, graph: LayerGraph, num_devices: int | None) -> Described:
    """The plan that a config of DeepSpeed's describes, with what its users give to
    ``PipelineModule`` beside it: ``num_stages``, ``partition_method``,
    ``activation_checkpoint_interval``.

    Args:
        config: as ``described.fields_of`` takes it.
        graph: the model's; each of its layers is one of DeepSpeed's.
        num_devices: of the whole job; with ``None``, as many as the batch sizes say.

    Raises:
        InputError: the config contradicts itself or the model.
    """
    said = ConfigFields(fields_of(config, _FIELDS, _OTHERS), "DeepSpeed")
    if "stages" in said.fields and said.fields["stages"] != "auto":
        said.fields.setdefault("num_stages", said.fields["stages"])
    stages = said.whole("num_stages")
    grouped = said.fields.get("zero_optimization")
    if grouped not in (None, False):
        raise InputError(
            f'zero_optimization is {shown(grouped)}; give an object, as {{"stage": 1}}'
        )
    zero = said.whole("stage", 0, 0)
    if zero > 1:
        raise InputError(
            f"zero_optimization: DeepSpeed's pipelines go with stage 1 at most, not {zero}"
        )
    rows, count, copies = _batches(said, stages, num_devices)
    interval = said.whole("activation_checkpoint_interval", 0, 0)
    return Described(
        tuple(_parts(said, graph, stages)[1:-1]),
        stages,
        "1f1b",
        count,
        rows,
        copies,
        is_sharded=zero == 1,
        recompute="layers" if interval else "never",
        notes=(f"activation_checkpoint_interval {interval} is taken as 1",) if interval > 1 else (),
    )


def _batches(said: ConfigFields, stages: int, num_devices: int | None) -> tuple[int, int, int]:
    """(rows of a microbatch, microbatches, copies), of which a config may leave one out."""
    names = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    rows, count = (said.whole(name, 0, 0) for name in names)
    total = said.whole("train_batch_size", 0, 0)
    copies = copies_of(num_devices, stages, said.engine) if num_devices else 0
    if not copies:
        copies = total // (rows * count) if rows and count and total else 1
    if not count:
        count = total // (rows * copies) if rows and total else 1
    if not rows:
        rows = total // (count * copies) if total else 1
    if total and total != rows * count * copies:
        raise InputError(
            f"train_batch_size {total} is not {rows} rows × {count} microbatches × {copies} copies"
        )
    return rows, count, copies


def _parts(said: ConfigFields, graph: LayerGraph, stages: int) -> list[int]:
    method = said.text("partition_method", "parameters").lower()
    if stages > len(graph.layers):
        raise InputError(f"{len(graph.layers)} layers cannot make {stages} stages")
    if method == "uniform":
        return uniform(len(graph.layers), stages)
    if method == "parameters":
        return balanced([layer.parameter_bytes for layer in graph.layers], stages)
    if method.startswith("type:"):
        matches = _of_kind(method.removeprefix("type:"), graph)
        return balanced([int(match) for match in matches], stages)
    raise InputError(
        f"partition_method is {shown(method)}; DeepSpeed has uniform, parameters and type:"
    )


def _of_kind(kind: str, graph: LayerGraph) -> list[bool]:
    """Which layers have a class whose name a pattern is found in."""
    try:
        pattern = re.compile(kind, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(
            f"partition_method is {shown(f'type:{kind}')}, which is no pattern: {error}"
        ) from None
    matches = [bool(pattern.search(layer.kind)) for layer in graph.layers]
    if not any(matches):
        kinds = ", ".join(sorted({layer.kind for layer in graph.layers})[:6])
        raise InputError(
            f"partition_method is {shown(f'type:{kind}')}, but no layer is of that kind; the "
            f"model's are {kinds}"
        )
    return matches


def uniform(num_layers: int, num_stages: int) -> list[int]:
    """Where stages begin and end that DeepSpeed makes with ``"uniform"``: the first ones are
    larger where it does not divide evenly."""
    least, more = divmod(num_layers, num_stages)
    sizes = [least + (stage < more) for stage in range(num_stages)]
    return [*accumulate(sizes, initial=0)]


def balanced(weights: Sequence[int], num_stages: int) -> list[int]:
    """Where stages begin and end that DeepSpeed makes with ``"parameters"``: the largest and the
    smallest sum lie close to each other, and of equals the latest cut is taken."""
    if len(weights) <= num_stages:
        return uniform(len(weights), num_stages)
    ends = [*accumulate(weights, initial=0)]
    # By first layers: (largest sum, smallest sum), and where the last stage begins.
    spans: list[tuple[float, float] | None] = [(0.0, inf), *[None] * len(weights)]
    begins: list[list[int]] = []
    for _ in range(num_stages):
        following: list[tuple[float, float] | None] = [None]
        places = [0]
        for stop in range(1, len(ends)):
            best, place, least = None, 0, inf
            for start in range(stop):
                before = spans[start]
                if before is None:
                    continue
                own = ends[stop] - ends[start]
                span = max(before[0], own), min(before[1], own)
                if span[0] - span[1] <= least:
                    best, place, least = span, start, span[0] - span[1]
            following.append(best)
            places.append(place)
        spans = following
        begins.append(places)
    cuts = [len(weights)]
    for places in reversed(begins):
        cuts.append(places[cuts[-1]])
    return cuts[::-1]
