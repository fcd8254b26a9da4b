"""torchtitan trains by plans: its own Llama, cut by its own code, in our order, has the losses and
gradients of the whole model."""

import pytest

from penstock.planning.handover.properties import one_copy
from tests.engines.conftest import reports_in
from tests.kit.transformer import layers_on, llama_names, llama_plan, modules_of

SCHEDULES = "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchtitan_trains_by_plans_as_one_device(torchtitan, ranks, tmp_path):
    plans = {name: llama_plan(name, ranks, 2 * ranks) for name in SCHEDULES}
    if ranks == 2:
        plans["recomputing"] = llama_plan("1f1b", 2, 4, recompute="layers")
    else:
        plans["replicas"] = llama_plan("1f1b", 4, 8, replicas="2-2")
        plans["sharded"] = llama_plan("1f1b", 4, 8, replicas="2-2", reducer="sharded")
    for name, plan in plans.items():
        plan.to("torchtitan").save(tmp_path / name)
    torchtitan.run("titan.py", tmp_path, num_ranks=ranks)
    for name, plan in plans.items():
        reports = reports_in(tmp_path / name)
        assert len(reports) == ranks
        copies = max(plan.replicas)
        schedule = one_copy(plan)
        for report in reports:
            rank = report["pipeline_rank"]
            assert not report["wrong"], name
            assert report["largest"] > 1e-4  # there is something to compare
            assert report["order"] == [str(op) for op in schedule.ranks[rank]]
            assert report["recomputes"] == (name == "recomputing")
            held = modules_of(report["parameters"], llama_names())
            assert held == layers_on(plan, rank * copies)
            if report["losses"]:
                assert report["losses"] == pytest.approx(report["alone"], rel=1e-5)
        assert sum(bool(report["losses"]) for report in reports) == copies
