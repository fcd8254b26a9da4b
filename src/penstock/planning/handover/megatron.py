"""Plans in the words of Megatron-Core, as arguments and as fields of its config."""

from __future__ import annotations

import shlex
from itertools import groupby
from typing import Any

from penstock.base.values import encode
from penstock.planning.handover.degrees import Degrees, degrees_of, notes_of
from penstock.planning.handover.modules import BlockLayout, block_layout
from penstock.planning.handover.written import Lines
from penstock.planning.plans import Plan


def write(plan: Plan) -> Lines:
    """The arguments of ``pretrain_gpt.py``, and the fields of ``TransformerConfig``."""
    degrees, blocks = degrees_of(plan), block_layout(plan)
    layout = layout_string(blocks)
    arguments = " \\\n    ".join(_arguments(degrees, blocks, layout))
    config = encode(_config(degrees, blocks, layout)) + "\n"
    return Lines(
        {"megatron_arguments.txt": f"    {arguments}\n", "transformer_config.json": config},
        (*_moved(blocks), *notes_of(plan, "megatron")),
    )


def layout_string(blocks: BlockLayout) -> str:
    """The stages as ``pipeline_model_parallel_layout`` has them: ``E`` the embedding, ``t`` a
    block, ``L`` norm, head and loss, ``|`` between stages, ``*n`` what repeats."""
    last = len(blocks.blocks) - 1
    stages = [
        "E" * (index == 0) + _repeated("t", count) + "L" * (index == last)
        for index, count in enumerate(blocks.blocks)
    ]
    runs = [(stage, len(list(same))) for stage, same in groupby(stages)]
    if len(runs) == 1 and runs[0][1] > 1:  # nowhere else is the last run a long one
        raise AssertionError("the first stage has an embedding, the last one a loss")
    parts = [stage if count == 1 else f"({stage}|)*{count}" for stage, count in runs]
    # A repeated run ends with its own border.
    return "".join(
        part + ("|" if not part.startswith("(") and place < len(parts) - 1 else "")
        for place, part in enumerate(parts)
    )


def _repeated(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 1 else letter * count


def _moved(blocks: BlockLayout) -> list[str]:
    """Notes on what Megatron-Core has in other stages than the plan."""
    notes = []
    late = [name for names in blocks.before[1:] for name in names]
    early = [name for names in blocks.behind[:-1] for name in names]
    for names, where in (
        (late, "the first stage, with the embedding"),
        (early, "the last stage, with the loss"),
    ):
        if names:
            notes.append(
                f"{', '.join(names)}: Megatron-Core has that in {where}, wherever the plan has it; "
                "the times predicted do not count that"
            )
    return notes


def _arguments(degrees: Degrees, blocks: BlockLayout, layout: str) -> list[str]:
    pairs: dict[str, object] = {"num-layers": sum(blocks.blocks)}
    pairs["pipeline-model-parallel-size"] = degrees.pipeline
    if degrees.pipeline > 1:
        pairs["pipeline-model-parallel-layout"] = shlex.quote(layout)
    pairs |= {
        "tensor-model-parallel-size": degrees.tensor,
        "context-parallel-size": 1,
        "expert-model-parallel-size": 1,
        "micro-batch-size": degrees.microbatch_size,
        "global-batch-size": degrees.local_batch_size * degrees.data,
    }
    flags = []
    if degrees.is_sequence:
        flags.append("--sequence-parallel")
    if degrees.is_sharded:
        flags.append("--use-distributed-optimizer")
    if degrees.recomputes:
        flags += ["--recompute-granularity full", "--recompute-method uniform"]
        flags += ["--recompute-num-layers 1"]
    return [*(f"--{name} {value}" for name, value in pairs.items()), *flags]


def _config(degrees: Degrees, blocks: BlockLayout, layout: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_layers": sum(blocks.blocks),
        "pipeline_model_parallel_size": degrees.pipeline,
        "tensor_model_parallel_size": degrees.tensor,
        "sequence_parallel": degrees.is_sequence,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    if degrees.pipeline > 1:
        config["pipeline_model_parallel_layout"] = layout
    if degrees.stages_per_rank > 1:
        config["virtual_pipeline_model_parallel_size"] = degrees.stages_per_rank
    if degrees.recomputes:
        config |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return config
