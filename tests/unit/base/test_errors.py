import inspect

import pytest

from penstock import errors

CLASSES = [one for _, one in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("error", CLASSES)
def test_the_tree_in_the_docstring_is_the_tree(error):
    assert issubclass(error, errors.PenstockError)
    assert error.__name__ in errors.__doc__


def test_what_a_caller_can_catch():
    for error in (errors.ScheduleError, errors.FileError, errors.ModelError, errors.PlanError):
        assert issubclass(error, errors.InputError)
    assert issubclass(errors.InputError, ValueError)
    for error in (errors.StageError, errors.PeerError, errors.DeadlineError):
        assert issubclass(error, errors.RunError)
    assert issubclass(errors.RunError, RuntimeError)
