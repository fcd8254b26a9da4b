"""A workload by name: what its own functions raise is one message, with the line."""

from __future__ import annotations

import pytest

from penstock.base.errors import ModelError
from penstock.cli.input import load_workload

MODULE = """
from dataclasses import replace
from tests.kit.small_workload import workload

def _no_model():
    raise KeyError("width")

def _two():
    yield from (batch for batch, _ in zip(workload().batches(), range(2)))
    raise ValueError("bad shard")

def model():
    return replace(workload(), build_model=_no_model)

def loader():
    return replace(workload(), batches=_two)

def itself():
    raise OSError("no data")
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    (tmp_path / "odd_workloads.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return lambda function: load_workload(f"odd_workloads:{function}")


def test_what_a_function_of_a_workload_raises_names_it_and_the_line(load):
    with pytest.raises(
        ModelError, match=r"the workload odd_workloads:itself raised OSError: no da"
    ):
        load("itself")
    with pytest.raises(ModelError, match=r"build_model of the .*KeyError.*odd_workloads.py:6, in"):
        load("model").build_model()
    batches = load("loader").batches()
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(
        ModelError, match=r"batches of the .*bad shard, because of odd_workloads.py"
    ):
        next(batches)
