"""What users import, and that planning does not import torch."""

import subprocess
import sys

import pytest

import penstock

WITHOUT_TORCH = """
import sys
import penstock as pk

layers = tuple(
    pk.Layer(name=name, forward_seconds=1, backward_input_seconds=1, backward_weight_seconds=1)
    for name in "abcd"
)
schedule = pk.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
pk.check(schedule)
pk.draw(pk.simulate(schedule))
assert "numpy" not in sys.modules  # the planner's tables need it
plan = pk.plan(pk.LayerGraph(layers=layers), pk.Cluster.local(2), microbatches=4)
str(plan)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_is_there(name):
    assert getattr(penstock, name) is not None
    assert name in dir(penstock)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = penstock.nonsense


def test_planning_simulating_and_drawing_leave_torch_alone():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, timeout=60)
