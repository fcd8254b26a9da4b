"""torch's own runtime trains by schedules that are written for it; gradients are those of one
device."""

from __future__ import annotations

import copy
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as schedules_of_torch
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.profiler import ProfilerActivity, profile

from penstock.core.schedule import families
from penstock.core.timing.timeline import Timeline
from penstock.planning.handover import to_torch_csv
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.one_device import OneDevice

SCHEDULES = "1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zb", "zb-v", "v-half"
COUNT = 8
FORMS = ["compute_only"]
if not hasattr(schedules_of_torch, "WAIT_SEND_F"):
    FORMS.append("compute_comms")  # torch 2.15 asks there where each send is waited for


def model_for_torch():
    model = make_mlp(dropout=0.0)
    for module in model:
        if isinstance(module, nn.ReLU):
            module.inplace = False  # torch's stages cannot begin with an in-place layer
    return model


def handed_over(model, plan, folder):
    """A rank's schedule, by the lines that are written for torch."""
    plan.to("torch").save(folder)
    spec = spec_from_file_location("torch_plan", folder / "torch_plan.py")
    written = module_from_spec(spec)
    spec.loader.exec_module(written)
    place = torch.device("cpu")
    return written.schedule_of(model, dist.get_rank(), place, loss_fn=F.cross_entropy)


def gradients_by_torch(model, name, path, form):
    """Of this rank's stages, by their names in the model."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plan = make_plan(model, size, COUNT, name)
    own = [(number, stage) for number, stage in enumerate(plan.stages) if stage.rank == rank]
    if form == "compute_only":
        runtime = handed_over(model, plan, path.with_suffix(""))
    else:
        runtime = with_messages(model, plan, own, path)
    inputs, targets = make_batch(2 * COUNT)
    first, last = (any(number == end for number, _ in own) for end in (0, len(plan.stages) - 1))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        runtime.step(*([inputs] if first else []), target=targets if last else None)
    profiler.export_chrome_trace(str(trace_of(path, rank)))
    layers = tuple(f"{layer}." for _, stage in own for layer in stage.layers)
    return {
        key: parameter.grad for key, parameter in model.named_parameters() if key.startswith(layers)
    }


def with_messages(model, plan, own, path):
    """A rank's schedule that says where messages are sent and received."""
    path.write_text(to_torch_csv(plan.build_schedule(), messages=True))
    stages = [
        PipelineStage(
            nn.Sequential(*(model[int(layer)] for layer in stage.layers)),
            number,
            len(plan.stages),
            torch.device("cpu"),
        )
        for number, stage in own
    ]
    runtime = _PipelineScheduleRuntime(stages, COUNT, loss_fn=F.cross_entropy)
    runtime._load_csv(str(path), format="compute_comms")
    return runtime


def trace_of(path, rank):
    """The file of a rank's trace; names of ranks' CSVs end in their numbers."""
    return path.with_name(f"{path.stem.rpartition('-')[0]}-rank{rank}.json")


def misread(path, name):
    """Differences between a plan's order and the timeline that torch's traces become."""
    schedule = families.build(name, num_ranks=dist.get_world_size(), num_microbatches=COUNT)
    paths = [trace_of(path, rank) for rank in range(dist.get_world_size())]
    timeline = Timeline.from_traces(paths)
    if timeline.schedule.ranks != schedule.ranks:
        yield f"{name}: the trace has {timeline.schedule}"
    end = {span.op: span.end for span in timeline.spans}
    for span in timeline.spans:  # what waits for its input begins when that is there
        needed = [end[op] for op in schedule.dependencies(span.op)]
        if span.start < max(needed, default=span.start):
            yield f"{name}: {span.op} begins before its input is there"


def differences(folder):
    alone = model_for_torch()
    OneDevice(alone, COUNT).step(*make_batch(2 * COUNT))
    wanted = {key: parameter.grad for key, parameter in alone.named_parameters()}
    for name in SCHEDULES:
        for form in FORMS:
            path = folder / f"{name}-{form}-{dist.get_rank()}.csv"
            found = gradients_by_torch(copy.deepcopy(model_for_torch()), name, path, form)
            dist.barrier()  # all traces are written
            yield from misread(path, name)
            for key, gradient in found.items():
                if gradient is None or not torch.allclose(gradient, wanted[key], atol=1e-7):
                    yield f"{name}, {form}: {key}"
            if not found:
                yield f"{name}, {form}: nothing was trained"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[-1])
    report = folder / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps([*differences(folder)]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
