"""Megatron-Core reads the arguments of plans that were handed over to it and builds the stages; run
by torchrun in its environment, which has no Penstock.

    mcore.py FOLDER

has a folder for each plan, into which ranks write their reports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

SHAPE = {"hidden_size": 16, "num_attention_heads": 4, "use_cpu_initialization": True}


def stages_of(fields):
    """The layers of each virtual stage of this rank in the model that Megatron-Core builds, and its
    config."""
    config = TransformerConfig(**fields, **SHAPE, pipeline_dtype=torch.float32)
    count = config.virtual_pipeline_model_parallel_size
    stages = []
    for number in range(count or 1):
        vp_stage = number if count else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=32,
            max_sequence_length=8,
            pre_process=first,
            post_process=last,
            vp_stage=vp_stage,
        )
        stages.append(
            {
                "embedding": hasattr(model, "embedding"),
                "blocks": [layer.layer_number - 1 for layer in model.decoder.layers],
                "head": hasattr(model, "output_layer"),
                "norm": model.decoder.final_layernorm is not None,
            }
        )
    return stages, config


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        fields = json.loads((folder / "transformer_config.json").read_text())
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=fields["pipeline_model_parallel_size"],
            virtual_pipeline_model_parallel_size=fields.get("virtual_pipeline_model_parallel_size"),
        )
        stages, config = stages_of(fields)
        report = {"stages": stages, "recompute": config.recompute_granularity}
        (folder / f"report-{rank}.json").write_text(json.dumps(report))
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
