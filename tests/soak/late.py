"""Plans that never flush, without a profile."""

from __future__ import annotations

import penstock as pk
from tests.kit.helpers import make_plan


def late_plan(model, num_ranks, num_microbatches=4) -> pk.Plan:
    """PipeDream's, cut evenly."""
    plan = make_plan(model, num_ranks, num_microbatches)
    return plan.edited(schedule="pipedream", versions=pk.versions.Stash())
