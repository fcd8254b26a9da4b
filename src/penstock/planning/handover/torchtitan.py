"""Plans in the words of torchtitan, whose configs are functions in Python, and its configs read."""

from __future__ import annotations

from penstock.planning.handover.degrees import (
    CLASSES,
    Degrees,
    degrees_of,
    head_of,
    notes_of,
    rows_of,
)
from penstock.planning.handover.modules import module_fqns_per_model_part
from penstock.planning.handover.properties import one_copy
from penstock.planning.handover.torch_schedules import to_torch_csv
from penstock.planning.handover.written import Lines
from penstock.planning.plans import Plan

_CONFIG = '''"""{head}, whose configs are functions: in a registry of yours,

    def mine() -> Trainer.Config:
        return planned(llama3_8b())
"""

from dataclasses import replace
from pathlib import Path

from torchtitan.distributed.activation_checkpoint import FullAC

FOLDER = Path(__file__).resolve().parent


def planned(config):
    """A Trainer.Config with the plan's stages, degrees, microbatches and schedule."""
    config.parallelism = replace(
        config.parallelism,
{fields}
    )
    config.training = replace(config.training, local_batch_size={rows})
    config.activation_checkpoint = {recompute}
    return config
'''


def write(plan: Plan) -> Lines:
    """A config's function, and the order as CSV where there is a pipeline."""
    degrees = degrees_of(plan)
    fields = _fields(plan, degrees)
    text = _CONFIG.format(
        head=head_of("torchtitan"),
        fields="\n".join(f"        {name}={value}," for name, value in fields.items()),
        rows=degrees.local_batch_size,
        recompute="FullAC.Config()" if degrees.recomputes else "None",
    )
    files = {"torchtitan_plan.py": text}
    if degrees.pipeline > 1:
        files["schedule.csv"] = to_torch_csv(one_copy(plan))
    return Lines(files, notes_of(plan, "torchtitan"))


def _fields(plan: Plan, degrees: Degrees) -> dict[str, str]:
    """The fields of ``ParallelismConfig``, as Python."""
    fields: dict[str, object] = {"pipeline_parallel_degree": degrees.pipeline}
    if degrees.pipeline > 1:
        fields |= {
            "module_fqns_per_model_part": _Python(
                rows_of(module_fqns_per_model_part(plan), indent="        ")
            ),
            "pipeline_parallel_schedule": CLASSES[degrees.placement],
            "pipeline_parallel_schedule_csv": _Python('str(FOLDER / "schedule.csv")'),
            "pipeline_parallel_microbatch_size": degrees.microbatch_size,
        }
    fields |= {
        "data_parallel_replicate_degree": 1 if degrees.is_sharded else degrees.data,
        "data_parallel_shard_degree": degrees.data if degrees.is_sharded else 1,
        "tensor_parallel_degree": degrees.tensor,
        "enable_sequence_parallel": degrees.is_sequence,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
    }
    return {name: _python(value) for name, value in fields.items()}


class _Python(str):
    """Text that is Python already."""


def _python(value: object) -> str:
    if isinstance(value, _Python):
        return value
    return f'"{value}"' if isinstance(value, str) else repr(value)
