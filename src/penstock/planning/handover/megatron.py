"""Plans in the words of Megatron-Core, as arguments and as fields of its config."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from penstock.base.errors import InputError
from penstock.base.values import encode, shown
from penstock.core.graph import LayerGraph
from penstock.planning.handover.degrees import Degrees, degrees_of, notes_of
from penstock.planning.handover.described import (
    ConfigFields,
    Described,
    copies_of,
    cuts_between_blocks,
    fields_of,
)
from penstock.planning.handover.modules import TransformerStages, block_layout, blocks_of
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


def layout_string(blocks: TransformerStages) -> str:
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


def _moved(blocks: TransformerStages) -> list[str]:
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


def _arguments(degrees: Degrees, blocks: TransformerStages, layout: str) -> list[str]:
    pairs: dict[str, object] = {"num-layers": sum(blocks.blocks)}
    pairs["pipeline-model-parallel-size"] = degrees.pipeline
    if degrees.pipeline > 1:
        pairs["pipeline-model-parallel-layout"] = shlex.quote(layout)
    pairs |= {
        "tensor-model-parallel-size": degrees.tensor,
        "context-parallel-size": 1,
        "expert-model-parallel-size": degrees.experts,
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


def _config(degrees: Degrees, blocks: TransformerStages, layout: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_layers": sum(blocks.blocks),
        "pipeline_model_parallel_size": degrees.pipeline,
        "tensor_model_parallel_size": degrees.tensor,
        "sequence_parallel": degrees.is_sequence,
        "context_parallel_size": 1,
        "expert_model_parallel_size": degrees.experts,
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


_FIELDS = frozenset((
    "num_layers", "pipeline_model_parallel_size", "pipeline_model_parallel_layout",
    "tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "micro_batch_size", "global_batch_size",
    "use_distributed_optimizer", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "recompute_activations", "microbatch_group_size_per_vp_stage",
    "microbatch_group_size_per_virtual_pipeline_stage",
))  # fmt: skip


def read(config: object, graph: LayerGraph, num_devices: int | None) -> Described:
    """The plan that arguments of Megatron's describe: a command or script, ``get_args()``, or a
    ``TransformerConfig`` beside sizes of batches.

    Args:
        config: as ``described.fields_of`` takes it.
        graph: the model's.
        num_devices: of the whole job; with ``None``, one copy of the pipeline.

    Raises:
        InputError: the arguments contradict themselves or the model.
    """
    said = ConfigFields(fields_of(config, _FIELDS), "Megatron")
    ranks = said.whole("pipeline_model_parallel_size", 1)
    names = [layer.name for layer in graph.layers]
    blocks = len(blocks_of(names).starts)
    if said.whole("num_layers", blocks) != blocks:
        raise InputError(
            f"num_layers is {said.whole('num_layers')}, but the model has {blocks} blocks; give "
            "the profile of the model that the arguments are for"
        )
    counts = _block_counts(said, blocks, ranks)
    per_rank = len(counts) // ranks
    schedule = "1f1b" if per_rank == 1 else f"interleaved-1f1b:stages_per_rank={per_rank}"
    width, rows = said.whole("tensor_model_parallel_size", 1), said.whole("micro_batch_size", 1)
    one_copy = ranks * width * said.whole("context_parallel_size", 1)
    copies = copies_of(num_devices, one_copy, said.engine)
    batch = said.whole("global_batch_size", rows * copies)
    if batch % (rows * copies):
        raise InputError(
            f"global_batch_size {batch} is no multiple of {copies} copies × {rows} rows"
        )
    count = batch // (rows * copies)
    recompute, notes = _recomputing(said)
    if per_rank > 1:
        notes = [*notes, *_rounds(said, count, ranks)]
    return Described(
        cuts_between_blocks(names, counts),
        ranks,
        schedule,
        count,
        rows,
        copies,
        width,
        said.flag("use_distributed_optimizer"),
        "layers" if recompute else "never",
        (*notes, *said.left_out("context_parallel_size")),
        said.whole("expert_model_parallel_size", 1),
    )


def _rounds(said: ConfigFields, microbatches: int, ranks: int) -> list[str]:
    """A note on rounds of more microbatches than ranks, if a virtual stage takes so many at a time.

    Raises:
        InputError: Megatron cannot interleave so many microbatches.
    """
    name = "microbatch_group_size_per_virtual_pipeline_stage"
    if name not in said.fields:
        name = "microbatch_group_size_per_vp_stage"
    size = said.whole(name, ranks)
    if not ranks <= size <= max(microbatches, ranks):
        raise InputError(
            f"{name} is {size}; Megatron takes {ranks}, the number of ranks, to {microbatches}, "
            "that of microbatches"
        )
    if 0 < microbatches % size < ranks:
        raise InputError(
            f"{microbatches} microbatches in rounds of {size} leave {microbatches % size} for the "
            f"last round, fewer than {ranks} ranks, which Megatron refuses where they have several "
            "stages each; change global_batch_size"
        )
    if size == ranks:
        return []
    return [
        f"{name} is {size}, and rounds of the plan have {ranks} microbatches, as many as ranks; "
        "the times predicted are for these"
    ]


def _block_counts(said: ConfigFields, blocks: int, ranks: int) -> list[int]:
    """The blocks of each stage, in the order of stages."""
    layout = _layout(said)
    if layout:
        counts = [stage.count("t") for stage in layout]
        if len(counts) % ranks:
            raise InputError(
                f"the layout has {len(counts)} stages, which {ranks} ranks cannot share"
            )
        return counts
    by_rank = _counts_by_rank(said, blocks, ranks)
    virtual = said.whole("num_virtual_stages_per_pipeline_rank", 1)
    virtual = said.whole("virtual_pipeline_model_parallel_size", virtual)
    if "num_layers_per_virtual_pipeline_stage" in said.fields:
        virtual = by_rank[0] // said.whole("num_layers_per_virtual_pipeline_stage")
    if any(count % max(virtual, 1) for count in by_rank) or not virtual:
        raise InputError(
            f"ranks of {by_rank} blocks do not make {virtual} equal virtual stages each"
        )
    return [count // virtual for _ in range(virtual) for count in by_rank]


_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _layout(said: ConfigFields) -> list[str]:
    """The letters of each stage of the layout, if the config sets one: a string, or a list of
    names for each stage."""
    name = "pipeline_model_parallel_layout"
    given: Any = said.fields.get(name)
    if hasattr(given, "input_data"):  # what a TransformerConfig makes of it
        said.fields[name] = given = given.input_data
    if isinstance(given, list | tuple):
        known = {**_LETTERS, **{letter: letter for letter in _LETTERS.values()}}
        try:
            stages = ["".join(known[str(part)] for part in stage) for stage in given]
        except (KeyError, TypeError):
            raise InputError(
                f"{name} is {shown(given)}; give a list for each stage, of {', '.join(_LETTERS)}"
            ) from None
    else:
        text = said.text(name)
        stages = stages_of_layout(text) if text else []
    letters = "".join(stages)
    if "m" in letters:
        raise InputError(
            "the layout has m, layers that predict more tokens, for which plans have no word; "
            "give the layout, and the profile, of the model without them"
        )
    for letter, place, words in (("E", 0, "begin with E, the embedding"), ("L", -1, "end with L")):
        if letters and (letters.count(letter) != 1 or letters[place] != letter):
            raise InputError(
                f"the layout {shown('|'.join(stages))} does not {words}, once, as Megatron wants it"
            )
    return stages


def _counts_by_rank(said: ConfigFields, blocks: int, ranks: int) -> list[int]:
    """The blocks of each rank where no layout says it: evenly, but for the ends."""
    first = _either(said, "decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
    last = _either(said, "decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
    inner = ranks - (first is not None) - (last is not None)
    rest = blocks - (first or 0) - (last or 0)
    ahead = said.flag("account_for_embedding_in_pipeline_split")
    behind = said.flag("account_for_loss_in_pipeline_split")
    total = rest + ahead + behind
    if (inner and total % inner) or (not inner and rest):
        raise InputError(
            f"{blocks} blocks do not divide evenly over {ranks} ranks; Megatron refuses that, too"
        )
    counts = [total // inner] * inner if inner else []
    if first is not None:
        counts = [first, *counts]
    if last is not None:
        counts = [*counts, last]
    counts[0] -= ahead
    counts[-1] -= behind
    return counts


def _either(said: ConfigFields, *names: str) -> int | None:
    given = [name for name in names if said.fields.get(name) is not None]
    return said.whole(given[0]) if given else None


def stages_of_layout(layout: str) -> list[str]:
    """The letters of each stage of a layout string.

    Raises:
        InputError: a letter is none of E, t, m and L.

    >>> stages_of_layout("Et*3|(tt|)*2,t|L")
    ['Ettt', 'tt', 'tt', 't', 'L']
    """
    plain = layout.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = _unrolled(plain, pattern, layout)
    wrong = sorted(set(plain) - set("EtmL|"))
    if wrong:
        raise InputError(
            f"the layout {shown(layout)} has {wrong[0]!r}; its letters are E, t, m and L"
        )
    return plain.split("|")


_MOST_LETTERS = 100_000


def _unrolled(text: str, pattern: str, layout: str) -> str:
    """A text with what it repeats written out, which a pattern finds beside the number of times."""
    letters = sum(
        len(match[1]) * int(match[2][:_MOST_DIGITS]) for match in re.finditer(pattern, text)
    )
    if letters > _MOST_LETTERS:
        raise InputError(f"the layout {shown(layout)} has {letters:,} letters; no model is so deep")
    return re.sub(pattern, lambda match: match[1] * int(match[2]), text)


_MOST_DIGITS = 20
"""Of a number, enough to see that it is too large; Python reads no number of thousands."""


def _recomputing(said: ConfigFields) -> tuple[bool, Sequence[str]]:
    """(whether blocks run forward twice, notes)."""
    granularity = said.text("recompute_granularity")
    if said.flag("recompute_activations") or granularity == "selective":
        return False, ["selective recomputation is left out: the plan keeps activations"]
    if granularity == "full" and said.text("recompute_method") == "block":
        return True, ["recompute_method block is taken as all blocks of a stage"]
    return granularity == "full", []
