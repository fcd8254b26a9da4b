"""Weights that torch's own distributed checkpoints carry between a pipeline and other programs."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import FileError, InputError
from penstock.interop.torch_checkpoints import load_dcp, save_dcp
from penstock.planning.handover import module_fqns_per_model_part
from penstock.planning.plans import Plan, StagePlan
from tests.kit.helpers import make_plan
from tests.kit.tiny_models import gpt_batch, make_gpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def gpt_loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def trained(model, num_ranks=2):
    pipeline = pk.Pipeline(
        model, make_plan(model, num_ranks, 4), loss=gpt_loss, optimizer=torch.optim.AdamW
    )
    pipeline.step(*gpt_batch(8, seed=1))
    return pipeline


def parts_as_torchtitan_cuts(model, module_names):
    """Copies of the whole model, each with the modules of one stage; as torchtitan's
    ``pipeline_module_split`` makes them, the other children being ``None`` or left out of lists."""
    parts = []
    for names in module_names:
        part = make_gpt()
        for child, module in [*part.named_children()]:
            if isinstance(module, nn.ModuleList):
                kept = {name.split(".")[1] for name in names if name.startswith(f"{child}.")}
                entries = {key: entry for key, entry in module.named_children() if key in kept}
                setattr(part, child, nn.ModuleDict(entries))
            elif child not in names:
                setattr(part, child, None)
        parts.append(part)
    return parts


def test_model_parts_with_the_plans_modules_load_what_a_pipeline_saves(tmp_path):
    model = make_gpt()
    with trained(model) as pipeline:
        save_dcp(pipeline, tmp_path)
        names = module_fqns_per_model_part(pipeline.plan)
    parts = parts_as_torchtitan_cuts(model, names)
    held = [set(part.state_dict()) for part in parts]
    assert set.union(*held) == set(model.state_dict())
    assert sum(map(len, held)) == len(model.state_dict())
    for part in parts:
        state = part.state_dict()
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        part.load_state_dict(state)
        for key, value in part.state_dict().items():
            assert value.equal(model.state_dict()[key])


@pytest.mark.parametrize("under", ["", "model"])
def test_a_pipeline_loads_what_another_program_saved(tmp_path, under):
    torch.manual_seed(7)
    theirs = make_gpt()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    state = theirs.state_dict()
    beside = {"train_state": {"step": 3}, **({under: state} if under else state)}
    dcp.save(beside, checkpoint_id=tmp_path, no_dist=True)
    ours = make_gpt()
    with trained(ours, num_ranks=4) as pipeline:
        load_dcp(pipeline, tmp_path, under=under)
        assert all(value.equal(state[key]) for key, value in ours.state_dict().items())
        loss = pipeline.step(*gpt_batch(8, seed=2))
    inputs, targets = gpt_batch(8, seed=2)
    torch.testing.assert_close(loss, gpt_loss(theirs(inputs), targets).detach())


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    model = make_gpt()
    with trained(model) as pipeline:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(FileError, match=r"is no folder of torch.distributed.checkpoint"):
            load_dcp(pipeline, tmp_path / "none")
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "under", no_dist=True)
        with pytest.raises(FileError, match=r"has no '.*'; it has model\..*Give under='…'"):
            load_dcp(pipeline, tmp_path / "under")
        wide = {key: torch.zeros(2, 3, 5) for key in before}
        dcp.save(wide, checkpoint_id=tmp_path / "wide", no_dist=True)
        with pytest.raises(FileError, match=r"is of shape \(2, 3, 5\), and the model has it of"):
            load_dcp(pipeline, tmp_path / "wide")
        assert all(value.equal(before[key]) for key, value in model.state_dict().items())


def plan_of(*stages):
    return Plan(
        model="a model",
        schedule="1f1b",
        num_microbatches=2,
        stages=tuple(StagePlan(layers=names, rank=rank) for rank, names in enumerate(stages)),
    )


def test_stages_are_told_as_torchtitan_lists_them():
    plan = plan_of(
        ("tok_embeddings", "layers.0.attention", "layers.0.feed_forward"),
        ("layers.1", "norm", "output", "output#2"),
    )
    assert module_fqns_per_model_part(plan) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "norm", "output"],
    ]


def test_a_cut_inside_of_a_block_is_refused():
    plan = plan_of(("embed", "layers.0.attention"), ("layers.0.feed_forward", "norm"))
    with pytest.raises(InputError, match=r"stage 0 and stage 1 both have a part of 'layers\.0'"):
        module_fqns_per_model_part(plan)
