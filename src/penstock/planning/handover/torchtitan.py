"""Plans in the words of torchtitan, whose configs are functions in Python, and its configs read."""

from __future__ import annotations

from penstock.base.errors import InputError
from penstock.base.values import read_text, shown
from penstock.core.graph import LayerGraph
from penstock.core.schedule import Schedule, families
from penstock.planning.handover.degrees import (
    CLASSES,
    Degrees,
    degrees_of,
    head_of,
    notes_of,
    rows_of,
)
from penstock.planning.handover.described import (
    ConfigFields,
    Described,
    Expression,
    copies_of,
    cuts_between_blocks,
    fields_of,
)
from penstock.planning.handover.modules import (
    blocks_of,
    child_namer,
    is_of_transformers,
    module_fqns_per_model_part,
    with_rotary,
)
from penstock.planning.handover.properties import one_copy
from penstock.planning.handover.torch_schedules import from_torch_csv, to_torch_csv
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
            "module_fqns_per_model_part": _Python(rows_of(_names(plan), indent="        ")),
            "pipeline_parallel_schedule": CLASSES[degrees.placement],
            "pipeline_parallel_schedule_csv": _Python('str(FOLDER / "schedule.csv")'),
            "pipeline_parallel_microbatch_size": degrees.microbatch_size,
        }
    # It divides experts among the ranks that it shards over.
    is_sharded = degrees.is_sharded or degrees.experts > 1
    fields |= {
        "data_parallel_replicate_degree": 1 if is_sharded else degrees.data,
        "data_parallel_shard_degree": degrees.data if is_sharded else 1,
        "tensor_parallel_degree": degrees.tensor,
        "enable_sequence_parallel": degrees.is_sequence,
        "context_parallel_degree": 1,
        "expert_parallel_degree": degrees.experts,
    }
    return {name: _python(value) for name, value in fields.items()}


def _names(plan: Plan) -> list[list[str]]:
    """The modules of each stage."""
    parts = module_fqns_per_model_part(plan)
    return with_rotary(parts, "rotary_emb") if is_of_transformers(plan.layers) else parts


class _Python(str):
    """Text that is Python already."""


def _python(value: object) -> str:
    if isinstance(value, _Python):
        return value
    return f'"{value}"' if isinstance(value, str) else repr(value)


_FIELDS = frozenset((
    "pipeline_parallel_degree", "module_fqns_per_model_part", "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size",
    "pipeline_parallel_layers_per_stage", "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers", "data_parallel_replicate_degree",
    "data_parallel_shard_degree", "tensor_parallel_degree", "context_parallel_degree",
    "expert_parallel_degree", "local_batch_size", "activation_checkpoint",
))  # fmt: skip
_OTHERS = ("global_batch_size",)

_FAMILIES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved-1f1b",
    "loopedbfs": "breadth-first", "interleavedzerobubble": "interleaved-zb",
    "zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v",
}  # fmt: skip
"""torch's schedules, by their names in small letters."""

_ONE_PER_RANK = frozenset({"1f1b", "gpipe"})
"""The families that have one stage per rank where a config does not say it; others have two."""


def read(config: object, graph: LayerGraph, num_devices: int | None) -> Described:
    """The plan that a config of torchtitan's describes: the text of its function, a command's
    arguments, or the ``Trainer.Config`` itself.

    Args:
        config: as ``described.fields_of`` takes it.
        graph: the model's.
        num_devices: of the whole job; with ``None``, as many as the config names.

    Raises:
        InputError: the config contradicts itself or the model.
    """
    said = ConfigFields(fields_of(config, _FIELDS, _OTHERS), "torchtitan")
    ranks = said.whole("pipeline_parallel_degree", 1)
    family = family_of(said, "pipeline_parallel_schedule", ranks)
    rows = said.whole("pipeline_parallel_microbatch_size", 1) if ranks > 1 else None
    count, rows = said.microbatches("local_batch_size", 8, rows)
    cuts = _cuts(said, graph, ranks, family)
    schedule, notes = named_schedule(
        said, "pipeline_parallel_schedule_csv", family, (ranks, (len(cuts) + 1) // ranks, count)
    )
    copies, is_sharded = _copies(said, ranks, num_devices)
    return Described(
        cuts,
        ranks,
        schedule,
        count,
        rows,
        copies,
        said.whole("tensor_parallel_degree", 1),
        is_sharded,
        "layers" if "FullAC" in _checkpointing(said) else "never",
        (*notes, *_left_out(said)),
        said.whole("expert_parallel_degree", 1),
    )


def family_of(said: ConfigFields, name: str, ranks: int) -> str:
    """The family of one of torch's schedules, which a field names.

    Raises:
        InputError: it is not here.
    """
    title = said.text(name, "1F1B")
    if title.lower() not in _FAMILIES:
        raise InputError(f"{name} is {shown(title)}, a schedule that is not here")
    return _FAMILIES[title.lower()] if ranks > 1 else "1f1b"


def stages_per_rank(family: str) -> int:
    """How many stages of a family torch's users give each rank, where nothing else is said."""
    return 1 if family in _ONE_PER_RANK else 2


def _checkpointing(said: ConfigFields) -> str:
    """The name of the policy of activation checkpointing."""
    policy = said.fields.get("activation_checkpoint")
    return str(policy) if isinstance(policy, str) else type(policy).__qualname__


def _cuts(said: ConfigFields, graph: LayerGraph, ranks: int, family: str) -> tuple[int, ...]:
    names = [layer.name for layer in graph.layers]
    cuts = listed_cuts(said, [*map(child_namer(names), names)], ranks)
    if cuts is not None:
        return cuts
    return cuts_between_blocks(
        names, _even_counts(said, len(blocks_of(names).starts), ranks, family)
    )


def listed_cuts(said: ConfigFields, names: list[str], ranks: int) -> tuple[int, ...] | None:
    """Where stages begin whose modules a config lists, if it does.

    Args:
        names: of the model's layers.

    Raises:
        InputError: these are no such lists, or not of this model.
    """
    parts = said.fields.get("module_fqns_per_model_part")
    if isinstance(parts, Expression):
        raise InputError("module_fqns_per_model_part is computed; give the list of its names")
    if not parts or ranks == 1:
        return None
    _check_lists(parts)
    cuts = _cuts_at(names, parts)
    _check_covered(names, parts)
    if (len(cuts) + 1) % ranks:
        raise InputError(
            f"module_fqns_per_model_part has {len(cuts) + 1} stages, which {ranks} ranks cannot "
            "share"
        )
    return cuts


def _check_lists(parts: object) -> None:
    """Raise ``InputError`` if these are no lists of names."""
    if not isinstance(parts, list | tuple) or not all(
        isinstance(part, list | tuple) and all(isinstance(name, str) for name in part)
        for part in parts
    ):
        raise InputError(
            f"module_fqns_per_model_part is {shown(parts)}; give a list of names for each stage"
        )


def _check_covered(names: list[str], parts: list[list[str]]) -> None:
    """Raise ``InputError`` if a layer is in no stage."""
    given = {name for part in parts for name in part}
    for layer in names:
        pieces = layer.split(".")
        above = {".".join(pieces[:count]) for count in range(1, len(pieces) + 1)}
        if not above & given and not any(name.startswith(f"{layer}.") for name in given):
            raise InputError(
                f"module_fqns_per_model_part has {layer} in no stage; name all layers of the model"
            )


def _cuts_at(names: list[str], parts: list[list[str]]) -> tuple[int, ...]:
    """Where stages begin that have these modules."""
    cuts = []
    for part in parts[1:]:
        first = part[0] if part else ""
        places = [
            place
            for place, name in enumerate(names)
            if name == first or name.startswith(f"{first}.")
        ]
        if not first or not places:
            raise InputError(
                f"module_fqns_per_model_part has a stage that begins with {shown(first)}, which is "
                f"no layer of the model: {', '.join(names[:6])} …"
            )
        cuts.append(places[0])
    return tuple(cuts)


def _even_counts(said: ConfigFields, blocks: int, ranks: int, family: str) -> list[int]:
    """The blocks of each stage where torchtitan divides them by itself: evenly, with embedding and
    head counted as some."""
    first = said.whole("pipeline_parallel_first_stage_less_layers", 1, 0)
    last = said.whole("pipeline_parallel_last_stage_less_layers", 1, 0)
    total = blocks + first + last
    per_stage = said.fields.get("pipeline_parallel_layers_per_stage")
    stages = ranks * stages_per_rank(family)
    if per_stage is not None:
        stages = -(-total // said.whole("pipeline_parallel_layers_per_stage"))
    if ranks == 1 or stages == 1:
        return [blocks]
    least, more = divmod(total, stages)
    counts = [least + (stage < more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    if stages % ranks or min(counts) < 0:
        raise InputError(f"{blocks} blocks make no {stages} even stages on {ranks} ranks")
    return counts


def named_schedule(
    said: ConfigFields, csv: str, family: str, shape: tuple[int, int, int]
) -> tuple[str, tuple[str, ...]]:
    """(the schedule with its options, notes): that of the CSV, if there is one and it is known.

    Args:
        csv: the field that has the CSV's path.
        shape: ranks, stages of each, microbatches.
    """
    ranks, per_rank, count = shape
    path = said.fields.get(csv)
    if isinstance(path, Expression):
        return _with_stages(family, per_rank), (
            f"{csv} is computed ({path}) and was not read; the plan has the order of {family}",
        )
    if not path or ranks == 1:
        return _with_stages(family, per_rank), ()
    order = from_torch_csv(read_text(str(path)))
    for name in families.names():
        if _is(order, name, per_rank, ranks, count):
            return _with_stages(name, per_rank), ()
    return _with_stages(family, per_rank), (
        f"{path} has an order that no family here makes; the plan has that of {family}",
    )


def _with_stages(family: str, per_rank: int) -> str:
    takes = family in ("interleaved-1f1b", "interleaved-zb", "breadth-first")
    return f"{family}:stages_per_rank={per_rank}" if takes and per_rank > 1 else family


def _is(order: Schedule, family: str, per_rank: int, ranks: int, count: int) -> bool:
    if family in families.SEARCHED:
        return False
    name, options = families.named(_with_stages(family, per_rank))
    try:
        return order == families.build(name, num_ranks=ranks, num_microbatches=count, **options)
    except InputError:
        return False


def _copies(said: ConfigFields, ranks: int, num_devices: int | None) -> tuple[int, bool]:
    """(copies of the pipeline, whether they share state)."""
    replicate = said.whole("data_parallel_replicate_degree", 1)
    shard = said.whole("data_parallel_shard_degree", -1, -1)
    width = said.whole("tensor_parallel_degree", 1) * said.whole("context_parallel_degree", 1)
    others = ranks * replicate * width
    if shard == -1:
        shard = copies_of(num_devices, others, said.engine)
    elif num_devices is not None and num_devices > others * shard:
        raise InputError(
            f"the config's degrees make {others * shard} devices, and the cluster has "
            f"{num_devices}, which torchtitan refuses; set data_parallel_shard_degree to -1, or "
            "give a cluster of the devices that the job has"
        )
    return replicate * shard, shard > 1


def _left_out(said: ConfigFields) -> list[str]:
    notes = said.left_out("context_parallel_degree")
    if "SelectiveAC" in _checkpointing(said):
        notes.append("selective activation checkpointing is left out: the plan keeps activations")
    return notes
