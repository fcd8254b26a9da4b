"""torchtitan trains by plans: its own Llama, cut by its own code, in our order, has the losses and
gradients of the whole model."""

import pytest

from tests.engines.conftest import reports_in
from tests.kit.transformer import layers_on, llama_names, llama_plan, modules_of

SCHEDULES = "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchtitan_trains_by_plans_as_one_device(torchtitan, ranks, tmp_path):
    plans = {name: llama_plan(name, ranks, 2 * ranks) for name in SCHEDULES}
    if ranks == 2:
        plans["recomputing"] = llama_plan("1f1b", 2, 4, recompute="layers")
    for name, plan in plans.items():
        plan.to("torchtitan").save(tmp_path / name)
    torchtitan.run("titan.py", tmp_path, num_ranks=ranks)
    for name, plan in plans.items():
        reports = reports_in(tmp_path / name)
        assert len(reports) == ranks
        schedule = plan.build_schedule()
        for rank, report in enumerate(reports):
            assert not report["wrong"], name
            assert report["largest"] > 1e-4  # there is something to compare
            assert report["order"] == [str(op) for op in schedule.ranks[rank]]
            assert report["recomputes"] == (name == "recomputing")
            held = modules_of(report["parameters"], llama_names())
            assert held == layers_on(plan, rank)
        losses = [report["losses"] for report in reports if report["losses"]]
        assert losses == [pytest.approx(reports[0]["alone"], rel=1e-5)]
