"""``penstock checkpoint``: tables of what was saved, and files for other programs."""

import json
from xml.etree.ElementTree import fromstring

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

from tests.kit.command_line import refused, run, succeed
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.tiny_models import make_gpt
from tests.kit.training import adamw, pipeline_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with a complete checkpoint and one that is not, and the model of the complete one."""
    folder, model = tmp_path_factory.mktemp("run"), make_mlp()
    with pipeline_of(model, optimizer=adamw) as pipeline:
        pipeline.step(*make_batch())
        pipeline.save(folder)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        pipeline.step(*make_batch())
        pipeline.save(folder)
    (folder / "step-00000002" / "stage-1.safetensors").unlink()
    return folder, state


def test_all_checkpoints_of_a_run_are_shown(saved):
    folder, _ = saved
    latest, first = run("checkpoint", "show", folder).splitlines()[1:]
    assert latest.startswith("step-00000002  not complete")
    assert "stage-1.safetensors is missing" in latest
    assert first.startswith("step-00000001  complete")
    assert "1f1b, 2 stages on 2 ranks" in first
    complete = {
        report["folder"]: report["complete"]
        for report in json.loads(run("checkpoint", "show", folder, "--json"))
    }
    assert list(complete.values()) == [False, True]


def test_the_files_of_one_checkpoint_are_shown(saved):
    folder, _ = saved
    told = run("checkpoint", "show", folder / "step-00000001")
    assert "stage-0.safetensors  0 … 2   AdamW" in told
    assert "stage-1.safetensors  3 … 5   AdamW" in told


def test_the_weights_are_one_file_for_torch(saved, tmp_path):
    folder, state = saved
    with pytest.warns(RuntimeWarning, match="skipped"):
        succeed("checkpoint", "export", folder, "-o", tmp_path / "model.safetensors")
    model = make_mlp(seed=9)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_folder(saved, tmp_path):
    folder, state = saved
    target = tmp_path / "dcp"
    arguments = ("checkpoint", "export", folder / "step-00000001", "--to", "dcp", "-o", target)
    succeed(*arguments)
    wanted = {key: torch.zeros_like(value) for key, value in state.items()}
    averages = {f"state.{key}.exp_avg": torch.zeros_like(value) for key, value in state.items()}
    options = {f"param_groups.{key}.lr": 0.0 for key in state}
    into = {**wanted, **averages, **options}
    load(into, checkpoint_id=target, no_dist=True)
    assert all(torch.equal(into[key], value) for key, value in state.items())
    assert all(bool(into[key].any()) for key in averages)
    assert all(into[key] == 1e-2 for key in options)
    assert "is there already" in refused(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_who_reads_what_is_drawn(saved, tmp_path):
    folder, _ = saved
    for name, ranks in (("three", 3), ("one", 1)):
        make_plan(make_mlp(), ranks, 4, "gpipe").save(tmp_path / f"{name}.json")
    make_plan(make_gpt(), 2, 4).save(tmp_path / "other.json")
    target, plans = tmp_path / "it.svg", [tmp_path / "three.json", tmp_path / "one.json"]
    arguments = ("checkpoint", "draw", folder / "step-00000001")
    succeed(*arguments, *plans, "-o", target)
    picture = fromstring(target.read_text())
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:3] == ["written by 1f1b, 2 ranks", "stage 0", "stage 1"]
    assert "stage-1.safetensors" in texts
    assert "read by gpipe, 1 rank" in texts
    # Each stage to its file, each file to two of three stages, and both to the only one.
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}path"))) == 2 + 4 + 2
    assert "must end in .svg" in refused(*arguments, *plans, "-o", tmp_path / "it.gif")
    told = refused(*arguments, tmp_path / "other.json", "-o", target)
    assert "is for another model: its layers are not the checkpoint's" in told


def test_what_is_no_run_is_refused(tmp_path):
    assert "has no checkpoints; give the folder" in refused("checkpoint", "show", tmp_path)
    assert "has no checkpoints" in refused("checkpoint", "show", tmp_path / "step-00000001")
    target = tmp_path / "model.safetensors"
    told = refused("checkpoint", "export", tmp_path, "-o", target)
    assert "has no complete checkpoint; see penstock checkpoint show" in told
    assert not target.exists()
