"""Plans in the words of NeMo AutoModel, whose recipes are YAML, and its recipes read."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.base.values import expect
from penstock.core.graph import LayerGraph
from penstock.planning.handover.degrees import CLASSES, degrees_of, head_of, notes_of
from penstock.planning.handover.described import (
    ConfigFields,
    Described,
    copies_of,
    cuts_between_blocks,
    fields_of,
)
from penstock.planning.handover.modules import (
    block_layout,
    blocks_of,
    module_fqns_per_model_part,
    with_rotary,
)
from penstock.planning.handover.properties import one_copy
from penstock.planning.handover.torch_schedules import to_torch_csv
from penstock.planning.handover.torchtitan import (
    family_of,
    listed_cuts,
    named_schedule,
    stages_per_rank,
)
from penstock.planning.handover.written import Lines
from penstock.planning.plans import Plan


def write(plan: Plan) -> Lines:
    """The sections of a recipe, and the order as CSV where there is a pipeline."""
    degrees = degrees_of(plan)
    distributed: dict[str, Any] = {
        "strategy": "fsdp2",
        "dp_size": degrees.data,
        "dp_replicate_size": 1 if degrees.is_sharded else degrees.data,
        "tp_size": degrees.tensor,
        "pp_size": degrees.pipeline,
        "cp_size": 1,
        "ep_size": 1,
        "sequence_parallel": degrees.is_sequence,
        "activation_checkpointing": degrees.recomputes,
    }
    files = {}
    if degrees.pipeline > 1:
        distributed["pipeline"] = {
            "pp_schedule": CLASSES[degrees.placement],
            "pp_schedule_csv": "schedule.csv",
            "pp_microbatch_size": degrees.microbatch_size,
            "pp_batch_size": degrees.local_batch_size,
            "module_fqns_per_model_part": _names(plan),
        }
        files["schedule.csv"] = to_torch_csv(one_copy(plan))
    sections = {
        "distributed": distributed,
        "step_scheduler": {
            "local_batch_size": degrees.local_batch_size,
            "global_batch_size": degrees.local_batch_size * degrees.data,
        },
    }
    head = f"# {head_of('automodel')}: sections of a recipe.\n"
    return Lines(
        {"automodel_plan.yaml": head + _yaml(sections), **files}, notes_of(plan, "automodel")
    )


def _names(plan: Plan) -> list[list[str]]:
    """The modules of each stage."""
    parent, _, _ = block_layout(plan).name.rpartition(".")
    rotary = f"{parent}.rotary_emb" if parent else "rotary_emb"
    return with_rotary(module_fqns_per_model_part(plan, nested=True), rotary)


def _yaml(tree: dict[str, Any], indent: str = "") -> str:
    """Dictionaries as indented YAML, all else as JSON, which YAML includes."""
    lines = []
    for name, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:\n{_yaml(value, indent + '  ')}")
        elif isinstance(value, list):
            rows = "".join(f"{indent}  - {_json(row)}\n" for row in value)
            lines.append(f"{indent}{name}:\n{rows}")
        else:
            lines.append(f"{indent}{name}: {_json(value)}\n")
    return "".join(lines)


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


_FIELDS = frozenset((
    "strategy", "pp_size", "tp_size", "dp_size", "dp_replicate_size", "cp_size", "ep_size",
    "activation_checkpointing", "pp_schedule", "pp_schedule_csv", "pp_microbatch_size",
    "layers_per_stage", "round_virtual_stages_to_pp_multiple", "module_fqns_per_model_part",
    "local_batch_size", "global_batch_size",
))  # fmt: skip
_OTHERS = ("microbatch_size", "base_activation_checkpointing")


def read(config: object, graph: LayerGraph, num_devices: int | None) -> Described:
    """The plan that a recipe of AutoModel's describes: its text, or what it has as a dictionary.

    Args:
        config: YAML or JSON, or as ``described.fields_of`` takes it.
        graph: the model's.
        num_devices: of the whole job; with ``None``, as many as the recipe names.

    Raises:
        InputError: the recipe contradicts itself or the model, or PyYAML is wanted to read it.
    """
    said = ConfigFields(fields_of(_tree(config), _FIELDS, _OTHERS), "NeMo AutoModel")
    ranks = said.whole("pp_size", 1)
    rows = said.whole("pp_microbatch_size", 1) if ranks > 1 else None
    count, rows = said.microbatches("local_batch_size", 1, rows)
    family = family_of(said, "pp_schedule", ranks)
    if count < ranks:
        raise InputError(
            f"local_batch_size {count * rows} makes {count} microbatches of {rows} rows, fewer "
            f"than {ranks} ranks, which NeMo AutoModel refuses; raise it"
        )
    names = [layer.name for layer in graph.layers]
    cuts = listed_cuts(said, names, ranks)
    if cuts is None:
        cuts = cuts_between_blocks(names, _even_counts(said, names, ranks, family))
    shape = ranks, (len(cuts) + 1) // ranks, count
    schedule, notes = named_schedule(said, "pp_schedule_csv", family, shape)
    copies, is_sharded = _copies(said, ranks, num_devices)
    return Described(
        cuts,
        ranks,
        schedule,
        count,
        rows,
        copies,
        said.whole("tp_size", 1),
        is_sharded,
        "layers" if said.flag("activation_checkpointing") else "never",
        (*notes, *_left_out(said, count * rows * copies)),
        said.whole("ep_size", 1),
    )


def _tree(config: object) -> Any:
    if not isinstance(config, str) or config.lstrip().startswith("{"):
        return config
    try:
        tree = msgspec.yaml.decode(config)
    except ImportError:
        raise InputError(
            "a recipe is YAML, which PyYAML reads: pip install pyyaml, or give what it has as a "
            "dictionary"
        ) from None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InputError(f"the config is no YAML: {error}") from None
    expect(tree, dict, "the config", "give a recipe, with its section `distributed`")
    return tree


def _even_counts(said: ConfigFields, names: list[str], ranks: int, family: str) -> list[int]:
    """The blocks of each stage where AutoModel divides them by itself: the first stages have one
    more where they do not divide."""
    blocks, stages = len(blocks_of(names).starts), ranks * stages_per_rank(family)
    if ranks > 1 and said.fields.get("layers_per_stage") is not None:
        stages = -(-blocks // said.whole("layers_per_stage"))
        rounding = said.text("round_virtual_stages_to_pp_multiple")
        if rounding in ("up", "down"):
            stages += -stages % ranks if rounding == "up" else -(stages % ranks)
    if ranks == 1:
        return [blocks]
    if stages % ranks or not 0 < stages <= blocks:
        raise InputError(f"{blocks} blocks make no {stages} stages on {ranks} ranks")
    least, more = divmod(blocks, stages)
    return [least + (stage < more) for stage in range(stages)]


def _copies(said: ConfigFields, ranks: int, num_devices: int | None) -> tuple[int, bool]:
    """(copies of the pipeline, whether they share state)."""
    size = ranks * said.whole("tp_size", 1) * said.whole("cp_size", 1)
    replicas = said.whole("dp_replicate_size", 1, 0) or 1
    copies = max(said.whole("dp_size", 0, -1), 0)
    if not copies:
        copies = copies_of(num_devices, size, said.engine)
    elif num_devices is not None and num_devices > size * copies:
        raise InputError(
            f"the recipe's sizes make {size * copies} devices, and the cluster has {num_devices}, "
            "which NeMo AutoModel refuses; leave dp_size out, or give a cluster of the devices "
            "that the job has"
        )
    return copies, copies > replicas and said.text("strategy", "fsdp2") != "ddp"


def _left_out(said: ConfigFields, rows: int) -> list[str]:
    """Notes on what plans have no words for.

    Args:
        rows: that all copies of the pipeline go through at once.
    """
    notes = said.left_out("cp_size")
    total = said.whole("global_batch_size", rows)
    if total > rows:
        notes.append(
            f"global_batch_size is {total}: gradients of {total / rows:g} passes of {rows} rows "
            "make one update, and the plan is of one pass"
        )
    return notes
