"""Folders of checkpoints: which of them count, what is told of the others, and whose they are."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import penstock as pk
from penstock.checkpoint import folder as folders
from penstock.checkpoint.folder import Checkpoint, checkpoint_in, folder_name
from penstock.checkpoint.piece import Piece
from penstock.errors import FileError, InputError
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.training import adamw, pipeline_of


def trained(run, steps=3, every=1, **options):
    """A run with a checkpoint after each step."""
    with pipeline_of(make_mlp(), optimizer=adamw, **options) as pipeline:
        for step in range(1, steps + 1):
            pipeline.step(*make_batch())
            if step % every == 0:
                pipeline.save(run)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run with three checkpoints; to be copied."""
    run = tmp_path_factory.mktemp("run")
    trained(run)
    return run


@pytest.fixture
def run(three, tmp_path):
    return Path(shutil.copytree(three, tmp_path / "run"))


def loaded(run):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        return pipeline.load(run)


def piece_of(run, step=3, stage=1):
    return run / folder_name(step) / f"stage-{stage}.safetensors"


def rewritten(path, change):
    """Change the head of a piece."""
    with safe_open(path, "pt") as file:
        head = json.loads(file.metadata()["penstock"])
        tensors = {name: file.get_tensor(name) for name in set(file.keys())}
    change(head)
    save_file(tensors, path, {"penstock": json.dumps(head)})


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def with_code(path):
    class Code:
        def __reduce__(self):
            return os.system, (f"touch {path.parent / 'ran'}",)

    path.write_bytes(pickle.dumps(Code()))


BROKEN = {
    "a piece is missing": (os.remove, r"stage-1\.safetensors is missing"),
    "a piece is cut short": (cut_short, "cannot read .*stage-1"),
    "a piece is empty": (lambda path: path.write_bytes(b""), "cannot read .*stage-1"),
    "a piece is a pickle": (with_code, "cannot read .*stage-1"),
    "a piece is a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot read .*stage-1"),
    "no plan": (lambda path: (path.parent / "plan.json").unlink(), r"it has no plan\.json"),
    "another plan": (
        lambda path: (
            pk.Plan.load(path.parent / "plan.json")
            .recomputing("layers")
            .save(path.parent / "plan.json")
        ),
        r"stage-0\.safetensors was written for another plan",
    ),
    "another piece": (
        lambda path: shutil.copy(path.with_name("stage-0.safetensors"), path),
        "it has the name of another piece",
    ),
    "of another attempt": (
        lambda path: rewritten(path, lambda head: head["identity"].update(attempt="x")),
        "stage-1.* and stage-0.* are not of the same attempt",
    ),
    "of another step": (
        lambda path: shutil.copy(path.parent.with_name(folder_name(2)) / path.name, path),
        "not of the same step",
    ),
    "a new format": (
        lambda path: rewritten(path, lambda head: head["identity"].update(format=2)),
        "has format 2; this Penstock reads format 1",
    ),
    "an unknown key": (
        lambda path: rewritten(path, lambda head: head.update(other=1)),
        "unknown field `other`",
    ),
    "another shape": (
        lambda path: rewritten(path, lambda head: head["tensors"]["5.bias"].__setitem__(1, [7])),
        r"its head gives '5\.bias' the shape \(7,\), but the file has \(4,\)",
    ),
    "no head": (
        lambda path: save_file({"a": torch.zeros(1)}, path),
        "it has no head of its own",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_not_complete_is_skipped_and_told(broken, run):
    spoil, told = BROKEN[broken]
    spoil(piece_of(run))
    with pytest.warns(RuntimeWarning, match=f"skipped: .*{told}"):
        assert loaded(run) == 2
    with pytest.raises(FileError, match=told):
        loaded(run / folder_name(3))
    assert not (run / folder_name(3) / "ran").exists()


def test_there_may_be_no_checkpoint_yet(tmp_path):
    assert loaded(tmp_path / "none") is None
    assert loaded(tmp_path) is None
    (tmp_path / "notes.txt").write_text("what I tried")
    assert loaded(tmp_path) is None
    with pytest.raises(FileError, match="is a file; give the folder"):
        loaded(tmp_path / "notes.txt")
    with pytest.raises(FileError, match="there is no folder"):
        loaded(tmp_path / folder_name(7))
    with pytest.raises(InputError, match="the folder of checkpoints is of type int"):
        loaded(3)


def test_the_latest_ones_stay(tmp_path):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        for step in range(1, 5):
            pipeline.step(*make_batch())
            pipeline.save(tmp_path, keep=2)
            if step == 3:  # a checkpoint that is not complete counts for nothing
                pipeline.save(tmp_path, keep=2, background=False)
                piece_of(tmp_path, 3, 0).unlink()
    assert {path.name for path in tmp_path.iterdir()} == {folder_name(step) for step in (2, 3, 4)}
    with pytest.warns(RuntimeWarning, match="skipped"):
        assert [one.step for one in folders.complete(tmp_path)] == [4, 2]


def test_a_run_does_not_write_into_the_folder_of_another(run):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        pipeline.step(*make_batch())
        with pytest.raises(FileError, match=r"checkpoints of another run; call pipeline\.load"):
            pipeline.save(run)
        pipeline.load(run)
        pipeline.step(*make_batch())
        pipeline.save(run)
    assert checkpoint_in(run).step == 4


def test_a_run_that_goes_back_replaces_what_came_after(run):
    with pipeline_of(make_mlp(), num_ranks=1, optimizer=adamw) as pipeline:
        assert pipeline.load(run / folder_name(2)) == 2
        pipeline.step(*make_batch(seed=9))
        pipeline.save(run)
    again = checkpoint_in(run)
    assert again.step == 3
    assert {path.name for path in again.folder.iterdir()} == {"plan.json", "stage-0.safetensors"}


def test_an_interrupted_replacement_is_no_checkpoint(run):
    before = piece_of(run).read_bytes()
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        pipeline.load(run / folder_name(2))
        pipeline.step(*make_batch(seed=9))
        pipeline.save(run)
    piece_of(run).write_bytes(before)  # as if stage 1 had not come to write its own
    with pytest.warns(RuntimeWarning, match="not of the same attempt"):
        assert loaded(run) == 2


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_is_full_is_told_and_leaves_what_was_there(background, run, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(FileError, match=r"cannot write .*stage-0.*: No space left on device"),
        pipeline_of(make_mlp(), optimizer=adamw) as pipeline,
    ):
        pipeline.load(run)
        pipeline.step(*make_batch())
        monkeypatch.setattr("penstock.checkpoint.piece.flush", full)
        pipeline.save(run, background=background)
        pipeline.close()
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="is not complete"):
        assert loaded(run) == 3
    assert not [path for path in (run / folder_name(4)).iterdir() if path.name.startswith(".")]


def test_a_failure_in_the_background_is_told_at_the_next_call(run, monkeypatch):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        pipeline.load(run)
        monkeypatch.setattr("penstock.checkpoint.keeper.write_piece", lambda *_: 1 / 0)
        pipeline.save(run)
        pipeline._keeper._saver._writing.exception()  # it has failed by now
        with pytest.raises(ZeroDivisionError):
            pipeline.step(*make_batch())
        pipeline.step(*make_batch())


def test_what_is_written_is_what_was_there_when_save_was_called(tmp_path):
    model = make_mlp()
    with pipeline_of(model, optimizer=adamw) as pipeline:
        pipeline.step(*make_batch())
        then = {key: value.clone() for key, value in model.state_dict().items()}
        pipeline.save(tmp_path)
        pipeline.step(*make_batch())
    checkpoint = checkpoint_in(tmp_path)
    assert checkpoint.step == 1
    for piece in checkpoint.pieces:
        for name in piece.header.tensors:
            if name in then:
                assert torch.equal(piece.read(name, (0,) * 9, then[name].shape), then[name])


def test_positions_are_plain_values(tmp_path):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        pipeline.step(*make_batch())
        with pytest.raises(InputError, match=r"position is <object.*a checkpoint holds"):
            pipeline.save(tmp_path, position=object())
        pipeline.save(tmp_path, position={"epoch": 2, "shards": (3, "b")})
        assert pipeline.load(tmp_path) == {"epoch": 2, "shards": (3, "b")}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"keep": 0}, "keep is 0, but must be ≥ 1"),
        ({"keep": True}, "keep is True"),
        ({"background": "yes"}, "background is 'yes'; give True or False"),
    ],
)
def test_wrong_arguments_are_refused(wrong, told, tmp_path):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        with pytest.raises(InputError, match=re.escape(told)):
            pipeline.save(tmp_path, **wrong)
        with pytest.raises(InputError, match="weights_only is 1"):
            pipeline.load(tmp_path, weights_only=1)


def test_pieces_are_as_readable_as_other_files(run):
    plan, piece = (
        os.stat(run / folder_name(3) / name).st_mode
        for name in ("plan.json", "stage-0.safetensors")
    )
    assert plan == piece


def test_optimizers_that_keep_what_no_file_can_hold_are_named(tmp_path):
    def strange(parameters):
        optimizer = adamw(parameters)
        optimizer.state[parameters[0]]["friend"] = object()
        return optimizer

    with (
        pipeline_of(make_mlp(), optimizer=strange) as pipeline,
        pytest.raises(InputError, match=r"AdamW's 'friend' of '0\.weight' is <object"),
    ):
        pipeline.save(tmp_path)


def test_a_checkpoint_names_its_pieces(run):
    checkpoint = Checkpoint.opened(run / folder_name(3))
    assert [piece.path.name for piece in checkpoint.pieces] == [
        "stage-0.safetensors", "stage-1.safetensors",
    ]  # fmt: skip
    assert checkpoint.num_bytes == sum(path.stat().st_size for path in checkpoint.folder.glob("s*"))
    assert isinstance(checkpoint.pieces[0], Piece)
