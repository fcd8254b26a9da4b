"""Plans in the words of DeepSpeed: its pipeline as Python, with one layer per stage, and its
config."""

from __future__ import annotations

from penstock.base.values import encode
from penstock.planning.handover.degrees import degrees_of, head_of, notes_of, rows_of
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
