"""Two ranks train a model of transformers of which neither ever has more than its stage.

    torchrun ... pretrained.py KIND PLAN FROM TO FOLDER

Each rank sees only those files of ``FROM`` that have something of its stage. It reports its losses,
what the pipeline gives, and which parameters it has: ``report-<rank>.json``.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaForCausalLM  # noqa: F401 - is loaded once for all ranks

import penstock as pk
import tests.kit.tracing  # noqa: F401 - is loaded once for all ranks
from penstock.base.errors import FileError, PenstockError
from penstock.training.checkpoint import pretrained
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.pretrained import BATCH, on_meta, pipeline_of

INDEX = "model.safetensors.index.json"


def own_files(plan: pk.Plan, model: torch.nn.Module, source: Path, target: Path) -> None:
    """Copy the index, and what has something of this rank's stage."""
    target.mkdir()
    shutil.copy(source / INDEX, target)
    weight_map = json.loads((source / INDEX).read_text())["weight_map"]
    layers = plan.stages[dist.get_rank()].layers
    names = {key for key in weight_map if any(key.startswith(f"{layer}.") for layer in layers)}
    if model.config.tie_word_embeddings:  # the last layer's is saved under the first one's name
        names |= {key for key in weight_map if "wte" in key or "embed_tokens" in key}
    for file in {weight_map[name] for name in names}:
        shutil.copy(source / file, target)
    if not model.config.tie_word_embeddings:
        assert {path.name for path in target.glob("*.safetensors")} < {*weight_map.values()}


def refusal(model: torch.nn.Module, plan: pk.Plan, folder: Path) -> str:
    """What this rank is told if rank 1 lacks a file."""
    if dist.get_rank() == 1:
        for path in folder.glob("*.safetensors"):
            path.unlink()
    try:
        pipeline_of(model, plan, initial_weights=folder)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_in_parts(folder: str) -> str:
    """What both ranks are told that have parts of the same layers."""
    model = make_mlp(0.0)
    plan = make_plan(model, 1, 4).with_tensor_split(
        2, {"0": "column", "1": "any", "2": "any", "3": "row"}
    )
    with pipeline_of(model, plan, loss=F.cross_entropy) as pipeline:
        pipeline.step(*make_batch())
        try:
            pipeline.save_pretrained(folder)
        except PenstockError as error:
            return str(error)
    return ""


def main(kind: str, plan_file: str, source: str, target: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)
    dist.init_process_group("gloo")
    rank, plan = dist.get_rank(), pk.Plan.load(plan_file)
    model = on_meta(kind)
    if kind == "gpt2":  # or one rank puts the files of both together
        pretrained._MOST_ALONE_BYTES = 0
    own = Path(folder, f"own-{rank}")
    own_files(plan, model, Path(source), own)
    with pipeline_of(model, plan, initial_weights=own) as pipeline:
        losses = [float(pipeline.step(BATCH)) for _ in range(3)]
        pipeline.save_pretrained(target)
        outputs = pipeline.evaluate(BATCH)["logits"]
        has = sorted(name for name, one in model.named_parameters() if not one.is_meta)
        stale = ""
        other = Path(target, "model-00001-of-00009.safetensors")
        other.touch()
        dist.barrier()
        try:
            pipeline.save_pretrained(target)
        except FileError as error:
            stale = str(error)
        except PenstockError as error:
            stale = f"told: {error}"
        dist.barrier()
        other.unlink(missing_ok=True)
    report = {
        "losses": losses,
        "outputs": outputs.tolist(),
        "has": has,
        "refused": refusal(on_meta(kind), plan, own),
        "stale": stale,
        "in parts": refused_in_parts(folder),
    }
    Path(folder, f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
