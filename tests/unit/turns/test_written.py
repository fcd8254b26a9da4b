"""A fleet's file: what it may say, and what it is refused for."""

from __future__ import annotations

import pytest

import penstock as pk
from penstock.base.errors import FileError
from penstock.planning.turns import FleetFile

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
        (
            'steps = 2\n[jobs.a]\nplan = "a"\nmemori = 3',
            r"jobs\.a has no key 'memori'; did you mean memory\?",
        ),
        ('steps = 2\ndevice = 2\n[jobs.a]\nplan = "a"', "the file has no key 'device'; did you me"),
        ('steps = 2\nxyz = 2\n[jobs.a]\nplan = "a"', "no key 'xyz'; take one of jobs, devices"),
        ("steps = 2\n[jobs.a]\nsteps = 3", r"jobs\.a: give either plan"),
        ('steps = 2\n[jobs.a]\nplan = "a"\ntier = "host"', r"jobs\.a: .*leave them out"),
        (
            'steps = 2\n[jobs.a]\ngraph = "a"\nmemory = "480 potatoes"',
            r"jobs\.a\.memory: .*480 potatoes.*is not a size",
        ),
        ('steps = 2\nepochs = 1\n[jobs.a]\nplan = "a"', "give one of them"),
        ('[jobs.a]\nplan = "a"', "write steps or epochs at the top of the file"),
        ("steps = 2\n[jobs]", "there is no job"),
        ("steps = 2", "the file lacks the key 'jobs'"),
        ("steps = 2\njobs = 3", r"jobs is 3; write a table \[jobs.NAME\]"),
        ("steps = 2\njobs = {a = 1}", r"jobs\.a is 1, but must be a table; write \[jobs\.a\]"),
        ("steps = 2\n[jobs.a]\nplan = 3", r"jobs\.a\.plan is 3, but must be text, in quotes"),
        (
            'steps = 2\n[jobs.a]\nplan = "a"\nsteps = "many"',
            r"jobs\.a\.steps is 'many', but must be a whole number",
        ),
        (
            'policy = "shortest"\nsteps = 2\n[jobs.a]\nplan = "a"',
            "policy is 'shortest', but must be one of 'longest', 'fair', 'whole'",
        ),
        ('[halving]\nlargest = 1\nevery = 2\n[jobs.a]\nplan = "a"', "largest is 1, .*true or f"),
        ('[halving]\nmetric = "loss"\n[jobs.a]\nplan = "a"', "halving lacks the key 'every'"),
        ('devices = 0\nsteps = 2\n[jobs.a]\nplan = "a"', "devices is 0"),
        ("jobs = ", r"fleet\.toml is not a valid fleet: it is no TOML: .*end of document"),
        ("steps = 2\n[jobs.a]\nplan = a", "it is no TOML: .*line 3, column 8"),
    ],
)
def test_what_it_is_refused_for(tmp_path, text, match):
    with pytest.raises(FileError, match=match):
        load(tmp_path, text)
