"""The files that ``save_pretrained`` writes: one, or one for each stage and an index."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from penstock.training.checkpoint import pretrained
from tests.kit.helpers import make_mlp
from tests.kit.training import adamw, pipeline_of

ALONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def parts(count):
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("num_stages", "most_bytes", "names"),
    [
        (1, 10**9, [ALONE]),
        (1, 0, [ALONE]),  # one stage has all of it, however much that is
        (2, 10**9, [ALONE]),
        (3, 10**9, [ALONE]),
        (2, 0, [*parts(2), INDEX]),
        (3, 0, [*parts(3), INDEX]),
    ],
)
def test_the_files_have_every_weight_once(num_stages, most_bytes, names, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "_MOST_ALONE_BYTES", most_bytes)
    expected = make_mlp().state_dict()
    with pipeline_of(make_mlp(), num_ranks=num_stages, optimizer=adamw) as pipeline:
        pipeline.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    there = [(path, load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert sorted(key for _, tensors in there for key in tensors) == sorted(expected)
    for _, tensors in there:
        assert all(torch.equal(value, expected[key]) for key, value in tensors.items())
    if INDEX in names:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["weight_map"] == {key: path.name for path, tensors in there for key in tensors}
        assert index["metadata"] == {
            "total_parameters": sum(value.numel() for value in expected.values()),
            "total_size": sum(value.nbytes for value in expected.values()),
        }
