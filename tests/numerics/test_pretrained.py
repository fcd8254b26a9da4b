"""Folders of transformers' ``save_pretrained`` go in and out of pipelines, a stage at a time."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import nn

import penstock as pk
from penstock.base.errors import FileError, ModelError
from penstock.training.checkpoint import pretrained
from penstock.training.checkpoint.piece import join_files
from tests.kit import training
from tests.kit.examples import more
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.pretrained import (
    BATCH,
    built,
    keys_in,
    logits_of,
    on_meta,
    pipeline_of,
    planned,
)
from tests.kit.spilling import make_net, spilled_pipeline

pytestmark = [
    pytest.mark.xdist_group("huggingface"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(transformers|accelerate).*"),
]

INDEX = "model.safetensors.index.json"
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture
def in_parts(monkeypatch):
    """Files of stages are left as they are, as those of large models."""
    monkeypatch.setattr(pretrained, "_MOST_ALONE_BYTES", 0)


def losses_of(pipeline):
    return [float(pipeline.step(BATCH)) for _ in range(3)]


def logits(pipeline):
    return pipeline.evaluate(BATCH)["logits"]


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        more("gpt2", "1f1b"),
        ("llama", "1f1b"),
        more("llama with tied weights", "1f1b"),  # GPT-2's are, too
        ("gpt2", "chimera"),
    ],
)
def test_transformers_and_pipelines_read_what_the_other_has_written(
    kind, schedule, tmp_path, in_parts
):
    plan, model = planned(kind, schedule), built(kind)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    assert len(keys_in(tmp_path / "theirs")) > 2
    with pipeline_of(built(kind), plan) as pipeline:
        expected = losses_of(pipeline)
    empty = on_meta(kind)
    with pipeline_of(empty, plan, initial_weights=tmp_path / "theirs") as pipeline:
        ours = logits(pipeline)
        torch.testing.assert_close(ours, logits_of(tmp_path / "theirs", model), **CLOSE)
        assert losses_of(pipeline) == expected
        pipeline.save_pretrained(tmp_path / "ours")
        assert not torch.allclose(logits(pipeline), ours)
        torch.testing.assert_close(logits(pipeline), logits_of(tmp_path / "ours", model), **CLOSE)
    written = [key for keys in keys_in(tmp_path / "ours").values() for key in keys]
    theirs = [key for keys in keys_in(tmp_path / "theirs").values() for key in keys]
    assert sorted(written) == sorted(theirs)
    index = json.loads((tmp_path / "ours" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [
        type(model).__name__
    ]
    with pipeline_of(on_meta(kind), plan, initial_weights=tmp_path / "ours") as pipeline:
        torch.testing.assert_close(logits(pipeline), logits_of(tmp_path / "ours", model), **CLOSE)


def test_weights_of_the_model_without_its_head_are_found(tmp_path):
    model = built("gpt2")
    model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in keys_in(tmp_path)["model.safetensors"]
    plan = planned("gpt2", "1f1b")
    with pipeline_of(on_meta("gpt2"), plan, initial_weights=tmp_path) as pipeline:
        with torch.no_grad():
            expected = model.eval()(BATCH["input_ids"]).logits
        torch.testing.assert_close(logits(pipeline), expected, **CLOSE)


def on_meta_of(build):
    with torch.device("meta"):
        return build()


def saved(folder, state=None):
    """A folder with two files and an index."""
    items = sorted((make_mlp(0.0, seed=7).state_dict() if state is None else state).items())
    weight_map = {}
    for number, part in enumerate((items[::2], items[1::2])):
        save_file(dict(part), folder / f"part-{number}.safetensors")
        weight_map |= {key: f"part-{number}.safetensors" for key, _ in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def loaded(folder, build=lambda: make_mlp(0.0), **options):
    model = on_meta_of(build)
    with training.pipeline_of(model, initial_weights=folder, **options) as pipeline:
        return pipeline.evaluate(make_batch()[0])


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path):
    saved(tmp_path)
    save_file({"5.bias": torch.ones(4)}, tmp_path / "adapter.safetensors")
    expected = make_mlp(0.0, seed=7)(make_batch()[0])
    torch.testing.assert_close(loaded(tmp_path), expected)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no index of weights; fetch it again"),
        ("{}", "is no index of weights; .*weight_map"),
        ('{"weight_map": {"0.bias": 3}}', "is no index of weights"),
        ('{"weight_map": {"0.bias": "../part-0.safetensors"}}', "no file of its folder"),
        ('{"weight_map": {"0.bias": "part-0.safetensors"}}', "lacks '0.weight', '3.bias'"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, index, message):
    saved(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(FileError, match=message):
        loaded(tmp_path)


def test_files_that_are_not_what_the_index_says_are_refused(tmp_path):
    weight_map = saved(tmp_path)
    other = {"0.bias": "part-1.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map | other}))
    with pytest.raises(FileError, match=r"part-1.* does not have '0.bias', which the index"):
        loaded(tmp_path)
    saved(tmp_path)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(FileError, match=r"cannot read the weights in .*part-1\.safetensors"):
        loaded(tmp_path)


def test_what_loses_no_digits_is_widened_and_all_else_refused(tmp_path):
    narrow = make_mlp(0.0, torch.bfloat16, seed=7)
    saved(tmp_path, narrow.state_dict())
    inputs = make_batch()[0]
    torch.testing.assert_close(loaded(tmp_path), narrow.float()(inputs))
    with pytest.raises(FileError, match=r"as torch.bfloat16 .*model\.to\(torch.bfloat16\)"):
        loaded(tmp_path, lambda: make_mlp(0.0, torch.float16))
    saved(tmp_path, {**narrow.state_dict(), "5.bias": torch.zeros(3)})
    with pytest.raises(FileError, match=r"'5.bias' as torch.float32 of shape \(3,\).* \(4,\)"):
        loaded(tmp_path)


class Angles(nn.Module):
    """Computes tables that no state_dict has."""

    sets = ("table", "steps")

    def __init__(self, size=16):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.register_buffer("table", torch.empty(size), persistent=False)
        self.register_buffer("steps", torch.empty(size, dtype=torch.long), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            if "table" in self.sets:
                self.table.copy_(torch.linspace(0, 1, len(self.table)))
            if "steps" in self.sets:
                self.steps.copy_(torch.arange(len(self.steps)))
            self.gain.fill_(1.0)

    def forward(self, value):
        return value * self.gain * self.table + self.steps


class Forgetful(Angles):
    sets = ("table",)


class Bare(Angles):
    reset_parameters = None

    def __init__(self):
        nn.Module.__init__(self)
        self.register_buffer("table", torch.ones(16), persistent=False)

    def forward(self, value):
        return value * self.table


class Strayed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(16)

    def forward(self, value):
        return value * self.scale


def with_layer(kind):
    def build():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(16, 16), kind(), nn.Linear(16, 4))

    return build


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_buffers_that_no_file_has_are_computed(tmp_path, schedule):
    model = with_layer(Angles)()
    with torch.no_grad():
        model[1].gain.uniform_()  # which computing the tables must not undo
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    outputs = loaded(tmp_path, with_layer(Angles), schedule=schedule)
    torch.testing.assert_close(outputs, model(make_batch()[0]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Bare, "'1.table' of Bare .*not persistent.* give Bare a reset_parameters"),
        (Forgetful, "'1.table', '1.steps' of Forgetful .* no file has their values"),
        (Strayed, "'1' keeps 'scale' as a tensor on the meta device .* register it as a buffer"),
    ],
)
def test_what_nothing_gives_values_is_refused_by_name(tmp_path, kind, message):
    save_file(with_layer(kind)().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path, with_layer(kind))


def test_what_is_small_is_in_one_file_whatever_the_stages(tmp_path):
    """A tiny model was written as shards."""
    for num_stages in (2, 1, 3):
        (tmp_path / ".model-00001-of-00009.part").touch()  # of a save that did not end
        model = make_mlp(0.0, seed=num_stages)
        options = {"loss": F.cross_entropy, "optimizer": training.sgd}
        with training.pipeline_of(model, "1f1b", num_stages, **options) as pipeline:
            pipeline.save_pretrained(tmp_path)
            state = pipeline.state_dict()
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        read = load_file(tmp_path / "model.safetensors")
        assert read.keys() == state.keys()
        assert all(torch.equal(read[key], value) for key, value in state.items())


def test_files_of_several_types_are_joined_and_stay_aligned(tmp_path):
    generator = torch.Generator().manual_seed(0)
    parts = [
        {"a": torch.ones(3, dtype=torch.uint8), "empty": torch.empty(0, 4)},
        {"b": torch.randn(5, 2, generator=generator), "c": torch.ones((), dtype=torch.float64)},
        {"d": torch.randn(3, generator=generator).bfloat16(), "ä": torch.tensor([True, False])},
    ]
    paths = [tmp_path / f"{number}.part" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        save_file(part, path)
    join_files(paths, tmp_path / "all.safetensors", {"format": "pt"})
    read = load_file(tmp_path / "all.safetensors")
    expected = {name: tensor for part in parts for name, tensor in part.items()}
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["all.safetensors"]
    with pytest.raises(FileError, match=r"cannot write .*all.safetensors"):
        join_files(paths, tmp_path / "all.safetensors", {})
    assert load_file(tmp_path / "all.safetensors").keys() == expected.keys()


@pytest.mark.usefixtures("in_parts")
def test_nothing_is_written_where_another_save_would_be_read_instead(tmp_path):
    options = {"loss": F.cross_entropy, "optimizer": training.sgd}
    with training.pipeline_of(make_mlp(0.0), "1f1b", 2, **options) as pipeline:
        pipeline.save_pretrained(tmp_path)
        pipeline.step(*make_batch())
        pipeline.save_pretrained(tmp_path)  # the same files
        torch.testing.assert_close(loaded(tmp_path), pipeline.evaluate(make_batch()[0]))
    with training.pipeline_of(make_mlp(0.0), "1f1b", 1, **options) as pipeline:
        with pytest.raises(FileError, match=r"has model-00001-of-00002.* of another save"):
            pipeline.save_pretrained(tmp_path)
        pipeline.save_pretrained(tmp_path / "new")
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]
        torch.testing.assert_close(loaded(tmp_path / "new"), pipeline.evaluate(make_batch()[0]))
    (tmp_path / "model.safetensors").touch()
    with (
        training.pipeline_of(make_mlp(0.0), "1f1b", 2, **options) as pipeline,
        pytest.raises(FileError, match=r"has model.safetensors of another save"),
    ):
        pipeline.save_pretrained(tmp_path)


@pytest.mark.parametrize(("kind", "blocks"), [("gpt2", "transformer.h"), ("llama", "model.layers")])
def test_a_plan_comes_from_a_shallow_twin(kind, blocks, tmp_path):
    few = {key: rows[:2] for key, rows in BATCH.items()}
    graph = pk.profile(built(kind), few, repeats=1, ranks=0).with_blocks(blocks, 3)
    deep = built(kind, 3)
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=4, stages=2, schedule="1f1b")
    deep.save_pretrained(tmp_path)
    # It takes no plan for a model of another fingerprint.
    with pipeline_of(on_meta(kind, 3), plan, initial_weights=tmp_path) as pipeline:
        torch.testing.assert_close(logits(pipeline), logits_of(tmp_path, deep), **CLOSE)


def test_stages_that_come_and_go_are_written_one_at_a_time(tmp_path):
    with spilled_pipeline(make_net()) as pipeline:
        pipeline.step(*make_batch(12))
        pipeline.save_pretrained(tmp_path)
        expected = pipeline.state_dict()
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    with torch.device("meta"):
        empty = make_net(seed=3)
    with spilled_pipeline(empty, options={"initial_weights": tmp_path}) as pipeline:
        again = pipeline.state_dict()
    assert all(torch.equal(again[key], value) for key, value in expected.items())


class Around(nn.Module):
    """Holds a table beside its layers, one of which it calls twice."""

    def __init__(self):
        super().__init__()
        self.once, self.twice, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("table", torch.empty(16), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.table.copy_(torch.linspace(1, 2, 16))
            self.once.weight.fill_(0.5)  # which is the file's to say

    def forward(self, value):
        value = torch.relu(self.twice(self.once(value))) + value
        return self.last(torch.tanh(self.twice(value)) * self.table)


def test_a_traced_model_has_tables_around_its_layers(tmp_path):
    torch.manual_seed(2)
    model, inputs = Around(), make_batch()[0]
    nn.init.normal_(model.once.weight)
    captured = pk.capture(model, inputs)
    assert sum(name.startswith("twice") for name in captured.names) == 2
    last = len(captured.names) - 1
    (tmp_path / "in").mkdir()
    save_file(model.state_dict(), tmp_path / "in" / "model.safetensors")
    for cut in range(1, last + 1):
        plan = replace(make_plan(captured, 2, 4, cuts=[cut]), example=captured.example)
        source, target = tmp_path / "in", tmp_path / f"out-{cut}"
        with pk.Pipeline(on_meta_of(Around), plan, initial_weights=source) as pipeline:
            torch.testing.assert_close(pipeline.evaluate(inputs), model(inputs).detach())
            pipeline.save_pretrained(target)
        written = [key for keys in keys_in(target).values() for key in keys]
        assert sorted(written) == sorted(model.state_dict())


def test_threads_that_share_layers_write_whole_ones(tmp_path):
    model = make_mlp(0.0, seed=7)
    plan = make_plan(model, 1, 4).with_tensor_split(
        2, {"0": "column", "1": "any", "2": "any", "3": "row"}
    )
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    options = {"loss": F.cross_entropy, "optimizer": training.sgd}
    empty = on_meta_of(lambda: make_mlp(0.0))
    with pk.Pipeline(empty, plan, initial_weights=tmp_path, **options) as pipeline:
        torch.testing.assert_close(pipeline.evaluate(make_batch()[0]), model(make_batch()[0]))
        pipeline.step(*make_batch())
        pipeline.save_pretrained(tmp_path)
        torch.testing.assert_close(loaded(tmp_path), pipeline.evaluate(make_batch()[0]))
