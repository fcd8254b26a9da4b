"""Whatever else is given in the place of a plan is refused by name, before it is planned with."""

from __future__ import annotations

import pytest

import penstock as pk


@pytest.mark.parametrize("other", ["plan.json", None])
def test_what_is_no_plan_is_not_replanned(other):
    with pytest.raises(pk.errors.InputError, match=r"the plan is .*penstock\.(plan|Plan)"):
        pk.replan(other, pk.Cluster(devices=(pk.Device(name="a"),)))
