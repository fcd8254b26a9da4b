"""What users import, and that planning does not import torch."""

import importlib
import pickle
import subprocess
import sys

import pytest

import penstock
from tests.kit.planning import chain, devices

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
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, timeout=300)


def test_dir_shows_public_names_only():
    assert dir(penstock) == sorted(penstock.__all__)
    assert set(dir(penstock.schedules)) == set(penstock.schedules.__all__)
    for name in penstock.schedules.__all__:
        assert callable(getattr(penstock.schedules, name))


@pytest.mark.parametrize("name", ["errors", "optimizers", "schedules", "stop", "versions"])
def test_a_public_module_is_one_module_by_all_its_names(name):
    module = importlib.import_module(f"penstock.{name}")
    assert module is getattr(penstock, name)
    assert module is importlib.import_module(module.__name__)
    assert module.__spec__.name == module.__name__


def test_an_error_is_called_as_people_import_it():
    from penstock.errors import PlanError

    assert PlanError is penstock.PlanError
    assert f"{PlanError.__module__}.{PlanError.__qualname__}" == "penstock.errors.PlanError"
    again = pickle.loads(pickle.dumps(PlanError("too large")))
    assert type(again) is PlanError and str(again) == "too large"


def test_fields_without_names_are_refused_with_a_cue():
    with pytest.raises(penstock.InputError, match=r"by name; write Device\(name='a', …\)"):
        penstock.Device("a")
    assert penstock.versions.Stash("microbatch") == penstock.versions.Stash()  # it allows that


@pytest.fixture(scope="module")
def plan():
    return penstock.plan(chain(), devices(2), microbatches=4, schedule="1f1b", stages=2)


def test_what_takes_a_schedule_takes_a_plan(plan):
    assert penstock.simulate(plan) == plan.simulate()
    slower = penstock.simulate(plan, penstock.Costs(forward=5.0))
    assert slower == penstock.simulate(plan.build_schedule(), penstock.Costs(forward=5.0))
    fed = penstock.simulate(plan, arrivals=1e-3)
    assert len(fed.arrivals) == plan.num_microbatches
    penstock.check(plan, capacity=1)
    assert "1f1b" in penstock.draw(plan)
    (row,) = penstock.compare(plan).rows()
    assert row == penstock.compare(plan.simulate()).rows()[0]
    titles = [row[0] for row in penstock.compare({"mine": plan}, plan.build_schedule()).rows()]
    assert titles == ["mine", "1f1b"]


@pytest.mark.parametrize("take", [penstock.simulate, penstock.check, penstock.compare])
def test_what_is_neither_is_refused(take):
    for wrong in ("1f1b", None, penstock.Plan):
        with pytest.raises(penstock.InputError):
            take(wrong)
