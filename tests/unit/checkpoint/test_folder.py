"""Folders of checkpoints: which of them count, what is told of the others, and whose they are."""

import json
import os
import pickle
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import penstock as pk
from penstock.base.errors import FileError, InputError
from penstock.training.checkpoint import folder as folders
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.folder import Checkpoint, checkpoint_in, folder_name
from penstock.training.checkpoint.piece import CheckpointPiece, write_piece
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
    "of a step that it has not": (
        lambda path: path.parent.rename(path.parent.with_name(folder_name(7))),
        "says that it is of step 3 of 2 stages, but step-00000007 and its plan",
    ),
    "a number of parts that cannot be": (
        lambda path: rewritten(path, lambda head: head.update(num_parts=0)),
        "part is 0 of 0",
    ),
    "a rate of 0": (
        lambda path: rewritten(path, lambda head: head["optimizing"].update(rate=0)),
        "rate is 0",
    ),
    "a scaler of another kind": (
        lambda path: rewritten(path, lambda head: head["identity"].update(scaler={"x": 1})),
        "scaler has the keys",
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
    (latest,) = {
        path for path in run.iterdir() if path.name not in (folder_name(1), folder_name(2))
    }
    with pytest.raises(FileError, match=told):
        loaded(latest)
    assert not (latest / "ran").exists()


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


def gone_back(run, step, keep=None):
    """A run that goes on from an earlier checkpoint than its last."""
    with pipeline_of(make_mlp(), num_ranks=1, optimizer=adamw) as pipeline:
        assert pipeline.load(run / folder_name(step)) == step
        pipeline.step(*make_batch(seed=9))
        pipeline.save(run, keep=keep)


def test_who_goes_back_writes_over_nothing_and_is_the_latest(run):
    before = {path: path.read_bytes() for path in run.glob("*/*")}
    gone_back(run, 1)
    assert checkpoint_in(run).folder.name == folder_name(2, 1)
    assert all(path.read_bytes() == content for path, content in before.items())
    gone_back(run, 1)
    assert checkpoint_in(run).folder.name == folder_name(2, 2)
    gone_back(run, 2, keep=2)
    assert {path.name for path in run.iterdir()} == {folder_name(3, 3), folder_name(2, 2)}


def test_the_step_that_was_loaded_may_be_saved_again(run):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        pipeline.load(run)
        pipeline.save(run, background=False)
        (run / folder_name(3, 1) / "stage-0.safetensors").unlink()  # as after a kill
    with pytest.warns(RuntimeWarning, match="is not complete"):
        assert loaded(run) == 3


def test_what_never_became_complete_is_nobodys(tmp_path):
    trained(tmp_path, steps=1)
    piece_of(tmp_path, 1).unlink()
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        with pytest.warns(RuntimeWarning, match="skipped"):
            assert pipeline.load(tmp_path) is None
        pipeline.step(*make_batch())
        pipeline.save(tmp_path)
    assert loaded(tmp_path) == 1


def left_by_a_kill(run, step):
    """As much of the checkpoint of a step as is there if the second rank dies in writing it."""
    folder = Path(shutil.copytree(run / folder_name(3), run / folder_name(step)))
    rewritten(folder / "stage-0.safetensors", lambda head: head["identity"].update(step=step))
    piece_of(run, step).rename(folder / ".stage-1.safetensors.partial")
    return folder


def test_what_a_kill_has_left_makes_room_before_anything_is_written(run, monkeypatch):
    dead = [left_by_a_kill(run, 4), left_by_a_kill(run, 9)]
    (dead[1] / "plan.json").unlink()
    unreadable = Path(shutil.copytree(run / folder_name(2), run / folder_name(7)))
    piece_of(run, 7, 0).write_bytes(b"of a later version, for all we know")
    kept = {path: path.read_bytes() for path in run.rglob("*.*") if path.parent not in dead}
    still_there = []

    def noting(*arguments):
        still_there.extend(path.name for path in dead if path.exists())
        return write_piece(*arguments)

    monkeypatch.setattr("penstock.training.checkpoint.keeper.write_piece", noting)
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        with pytest.warns(RuntimeWarning, match="skipped"):
            assert pipeline.load(run) == 3
        assert all(path.exists() for path in dead)  # who loads may want to read only
        late = left_by_a_kill(run, 8)  # by somebody who is there now
        pipeline.step(*make_batch())
        pipeline.save(run, background=False)
    assert not still_there
    assert late.exists()
    assert unreadable.exists()
    assert all(path.read_bytes() == content for path, content in kept.items() if path.is_file())
    assert Checkpoint.opened(run / folder_name(4, 1)).step == 4


def test_before_the_first_complete_checkpoint_there_is_room_again_as_well(tmp_path):
    trained(tmp_path, steps=1)
    piece_of(tmp_path, 1, 0).unlink()  # by whose head nobody knows any more who wrote the rest
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        with pytest.warns(RuntimeWarning, match="skipped"):
            assert pipeline.load(tmp_path) is None
        pipeline.step(*make_batch())
        pipeline.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder_name(1, 1)]
    assert loaded(tmp_path) == 1


def test_nothing_stays_of_what_never_became_complete(tmp_path):
    trained(tmp_path, steps=1, num_ranks=3)
    piece_of(tmp_path, 1, 0).unlink()
    trained(tmp_path, steps=1, num_ranks=1)
    names = {path.name for path in (tmp_path / folder_name(1)).iterdir()}
    assert names == {"plan.json", "stage-0.safetensors"}


def test_what_is_half_removed_is_no_checkpoint(run, monkeypatch):
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # as if it had been killed there
    folders.prune(run, 1)
    assert [one.step for one in folders.seen_in(run)] == [3, 2, 1]
    with pytest.warns(RuntimeWarning, match="skipped"):
        assert [one.step for one in folders.complete(run)] == [3]


class Wide(torch.optim.SGD):
    """Keeps means in single precision of gradients in half."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros(parameter.shape))
                mean.lerp_(parameter.grad.float(), 0.01)
        return super().step(closure)


def test_state_is_not_rounded_to_the_type_of_its_parameter(tmp_path):
    def pipeline():
        model = make_mlp(dtype=torch.bfloat16)
        return pipeline_of(model, optimizer=lambda parameters: Wide(parameters, lr=0.1))

    with pipeline() as first:
        first.step(*make_batch(dtype=torch.bfloat16))
        first.save(tmp_path / "a")
    with pipeline() as second:
        second.load(tmp_path / "a")
        second.save(tmp_path / "b")
    ours, theirs = (Contents(checkpoint_in(tmp_path / name)) for name in "ab")
    means = [name for name in ours.checkpoint.pieces_with if name.endswith("/mean")]
    assert len(means) == 6
    for name in means:
        assert ours.tensor(name).dtype == torch.float32
        assert torch.equal(ours.tensor(name), theirs.tensor(name))


def test_two_jobs_that_go_on_from_the_same_folder_are_told_apart(run):
    first, second = (pipeline_of(make_mlp(), optimizer=adamw) for _ in range(2))
    with first, second:
        first.load(run)
        second.load(run)
        first.step(*make_batch())
        first.save(run, background=False)
        second.step(*make_batch())
        with pytest.raises(FileError, match=r"another job saves in .*stop one of them"):
            second.save(run)
        first.step(*make_batch())
        first.save(run)


def test_a_checkpoints_own_folder_is_no_place_to_save(run):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        pipeline.load(run / folder_name(2))
        with pytest.raises(InputError, match="is the folder of one checkpoint; save to that of"):
            pipeline.save(run / folder_name(2))


def test_the_folder_is_that_of_the_call_wherever_the_process_goes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        pipeline.step(*make_batch())
        pipeline.save("run")
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert loaded(tmp_path / "run") == 1


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
        monkeypatch.setattr("penstock.training.checkpoint.piece.flush", full)
        pipeline.save(run, background=background)
        pipeline.close()
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="is not complete"):
        assert loaded(run) == 3
    assert not [path for path in (run / folder_name(4)).iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("background", [True, False])
def test_a_file_that_may_not_grow_is_told_by_the_system_itself(background, run):
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    pipeline = pipeline_of(make_mlp(), optimizer=adamw)
    try:
        pipeline.load(run)
        pipeline.step(*make_batch())
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, most[1]))  # enough for the plan
        with pytest.raises(FileError, match=r"cannot write .*stage-0"):
            pipeline.save(run, background=background)
            pipeline.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        pipeline.close()
    with pytest.warns(RuntimeWarning, match="is not complete"):
        assert loaded(run) == 3


def test_a_failure_in_the_background_is_told_at_the_next_call(run, monkeypatch):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        pipeline.load(run)
        monkeypatch.setattr("penstock.training.checkpoint.keeper.write_piece", lambda *_: 1 / 0)
        pipeline.save(run)
        pipeline._keeper._saver._writing[0].exception()  # it has failed by now
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


def test_saving_never_changes_the_umask_for_it_is_that_of_all_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask has been changed"))
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        pipeline.save(tmp_path)


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
    assert isinstance(checkpoint.pieces[0], CheckpointPiece)


HEADS = {
    "a position of no kind": (
        lambda head: head["identity"].update(position={"$x": 1}),
        "is no value that a checkpoint holds",
    ),
    "a tensor that is larger than its file": (
        lambda head: head["tensors"].update(
            {"optimizer/0.weight/exp_avg": ["float32", [10**9, 10**9], [0, 0], [32, 16]]}
        ),
        "does not hold all 1,000,000,000,000,000,000 numbers of",
    ),
    "options with parameters": (
        lambda head: head["optimizing"]["options"]["0.weight"].update(params=[1]),
        "'params' was|impossible options",
    ),
    "a rate that is none": (
        lambda head: [one.update(lr="abc") for one in head["optimizing"]["options"].values()],
        "has impossible options",
    ),
    "a step that no run comes to": (
        lambda head: head["identity"].update(step=10**30),
        "is not complete|step",
    ),
}


@pytest.mark.parametrize("wrong", HEADS)
def test_a_head_that_was_made_by_hand_changes_nothing(wrong, tmp_path):
    change, told = HEADS[wrong]
    trained(tmp_path, steps=1, num_ranks=1)
    rewritten(piece_of(tmp_path, 1, 0), change)
    model = make_mlp(seed=5)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with (
        pipeline_of(model, num_ranks=1, optimizer=adamw) as pipeline,
        pytest.raises(InputError, match=told),
    ):
        pipeline.load(tmp_path / folder_name(1))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Counting(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    def step(self, closure=None):
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


class Telling(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "more": 1}


class Slashed(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["m/avg"] = torch.zeros(1)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (lambda parameters: Counting(parameters, lr=0.1), "Counting keeps 'calls' beside what"),
        (lambda parameters: Telling(parameters, lr=0.1), "Telling keeps 'more' beside what"),
        (lambda parameters: Slashed(parameters, lr=0.1), "something under 'm/avg' for '0.weight'"),
    ],
)
def test_what_would_be_lost_is_refused(optimizer, told, tmp_path):
    with pipeline_of(make_mlp(), optimizer=optimizer) as pipeline:
        pipeline.step(*make_batch())
        with pytest.raises(InputError, match=re.escape(told)):
            pipeline.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_buffers_into_which_nothing_can_be_read_are_named(tmp_path):
    model = make_mlp()
    model[0].register_buffer("wide", torch.zeros(1).expand(4))
    with (
        pipeline_of(model, optimizer=adamw) as pipeline,
        pytest.raises(InputError, match=r"'0\.wide' is an expanded view of shape \(4,\)"),
    ):
        pipeline.save(tmp_path)


@pytest.mark.parametrize("position", ["\udc80", {"a": "\udc80"}])
def test_texts_that_are_none_are_refused(position, tmp_path):
    with (
        pipeline_of(make_mlp(), optimizer=adamw) as pipeline,
        pytest.raises(InputError, match="position has a text in it that is no Unicode"),
    ):
        pipeline.save(tmp_path, position=position)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_impossible_names_are_refused(name, tmp_path):
    with pipeline_of(make_mlp(), optimizer=adamw) as pipeline:
        with pytest.raises(FileError, match="no folder can be called"):
            pipeline.save(tmp_path / name)
        with pytest.raises(FileError, match="no folder can be called"):
            pipeline.load(tmp_path / name)
