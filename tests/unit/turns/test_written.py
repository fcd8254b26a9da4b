"""A fleet's file: what it may say, and what it is refused for."""

from __future__ import annotations

import pytest

import penstock as pk
from penstock.errors import FileError
from penstock.turns import FleetFile

FILE = """
devices = 3
policy = "fair"

[halving]
every = 50
metric = "accuracy"
largest = true

[jobs.small]
plan = "small.json"

[jobs.large]
graph = "large.json"
memory = "480MiB"
tier = "host"
microbatches = 4
steps = 70
workload = "jobs:large"
seed = 3
"""


def load(tmp_path, text):
    (tmp_path / "fleet.toml").write_text(text)
    return FleetFile.load(tmp_path / "fleet.toml")


def test_units_are_text_and_files_are_beside_it(tmp_path):
    file = load(tmp_path, FILE)
    assert (file.devices, file.policy) == (3, "fair")
    assert file.stop() == pk.stop.halving("accuracy", every=50, largest=True)
    large = file.jobs["large"]
    assert (large.memory, large.tier, large.steps, large.seed) == (480 << 20, "host", 70, 3)
    assert large.graph == str(tmp_path / "large.json")
    assert file.jobs["small"].plan == str(tmp_path / "small.json")
    assert load(tmp_path, 'steps = 3\n[jobs.a]\nplan = "a"\n').stop() == pk.stop.steps(3)
    assert load(tmp_path, 'epochs = 3\n[jobs.a]\nplan = "a"\n').stop() == pk.stop.epochs(3)
    assert load(tmp_path, '[jobs.a]\nplan = "a"\nsteps = 3\n').stop() == pk.stop.Stop()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('steps = 2\n[jobs.a]\nplan = "a"\nmemori = 3', r"unknown field `memori`.*jobs"),
        ('steps = 2\ndevice = 2\n[jobs.a]\nplan = "a"', "unknown field `device`"),
        ("steps = 2\n[jobs.a]\nsteps = 3", "give either plan"),
        ('steps = 2\n[jobs.a]\nplan = "a"\ntier = "host"', "leave them out"),
        (
            'steps = 2\n[jobs.a]\ngraph = "a"\nmemory = "480 potatoes"',
            "480 potatoes.*is not a size",
        ),
        ('steps = 2\nepochs = 1\n[jobs.a]\nplan = "a"', "give one of them"),
        ('[jobs.a]\nplan = "a"', "nobody says how long"),
        ("steps = 2\n[jobs]", "there is no job"),
        ("steps = 2", "missing required field `jobs`"),
        ('policy = "shortest"\nsteps = 2\n[jobs.a]\nplan = "a"', "policy"),
        ('devices = 0\nsteps = 2\n[jobs.a]\nplan = "a"', "devices is 0"),
        ("jobs = ", "not a valid fleet"),
    ],
)
def test_what_it_is_refused_for(tmp_path, text, match):
    with pytest.raises(FileError, match=match):
        load(tmp_path, text)
