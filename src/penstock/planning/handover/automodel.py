"""Plans in the words of NeMo AutoModel, whose recipes are YAML."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.planning.handover.degrees import CLASSES, degrees_of, head_of, notes_of
from penstock.planning.handover.modules import block_layout, module_fqns_per_model_part
from penstock.planning.handover.properties import one_copy
from penstock.planning.handover.torch_schedules import to_torch_csv
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
    """The modules of each stage. Rotary embeddings have no weights and are wanted by every block;
    a name that the model has not is none that AutoModel misses."""
    parent, _, _ = block_layout(plan).name.rpartition(".")
    rotary = f"{parent}.rotary_emb" if parent else "rotary_emb"
    parts = module_fqns_per_model_part(plan, nested=True)
    return [[name for name in names if name != rotary] + [rotary] for names in parts]


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
