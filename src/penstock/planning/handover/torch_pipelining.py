"""Plans in the words of ``torch.distributed.pipelining``."""

from __future__ import annotations

from penstock.planning.handover.degrees import degrees_of, head_of, notes_of, rows_of
from penstock.planning.handover.properties import one_copy
from penstock.planning.handover.torch_schedules import to_torch_csv
from penstock.planning.handover.written import Lines
from penstock.planning.plans import Plan

_MODULE = '''"""{head}, run by its _PipelineScheduleRuntime:

    schedule = schedule_of(model, rank, torch.device("cpu"), loss_fn=loss)
    schedule.step(*([inputs] if rank == FIRST else []), target=targets if rank == LAST else None)
"""

from pathlib import Path

from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

FOLDER = Path(__file__).resolve().parent
STAGES = {stages}
RANKS = {ranks}
FIRST, LAST = RANKS[0], RANKS[-1]
MICROBATCHES = {microbatches}


def schedule_of(model, rank, device, group=None, **options):
    """The schedule of a rank of one pipeline, with the stages that it has of a model whose modules
    follow one another."""
    stages = [
        PipelineStage(
            nn.Sequential(*(model.get_submodule(name) for name in names)),
            number, len(STAGES), device, group=group,
        )
        for number, names in enumerate(STAGES)
        if RANKS[number] == rank
    ]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, **options)
    runtime._load_csv(str(FOLDER / "schedule.csv"))
    return runtime
'''


def write(plan: Plan) -> Lines:
    """The lines that make a rank's schedule, and its order as CSV."""
    degrees, schedule = degrees_of(plan), one_copy(plan)
    text = _MODULE.format(
        head=head_of("torch"),
        stages=rows_of(stage.layers for stage in plan.stages),
        ranks=[schedule.ranks_of(stage)[0] for stage in range(len(plan.stages))],
        microbatches=degrees.microbatches,
    )
    notes = notes_of(plan, "torch")
    if degrees.data > 1 or degrees.tensor > 1:
        notes += (
            "replicas and tensor parallelism are yours to add to the stages' modules, with "
            "fully_shard or DistributedDataParallel and parallelize_module",
        )
    if degrees.recomputes:
        again = [index for index, own in enumerate(plan.stages) if own.recompute != "none"]
        notes += (
            f"stages {', '.join(map(str, again))} recompute: wrap their modules in "
            "torch.utils.checkpoint",
        )
    return Lines({"torch_plan.py": text, "schedule.csv": to_torch_csv(schedule)}, notes)
