"""DeepSpeed trains by plans that are written for it: its own pipeline engine, cut as the plan says,
makes the update of one device."""

import pytest

from tests.engines.conftest import reports_in
from tests.kit.transformer import llama_plan


@pytest.mark.timeout(600)
def test_deepspeed_trains_by_plans_as_one_device(deepspeed, tmp_path):
    plans = {
        "1f1b": llama_plan("1f1b", 4, 8),
        "layers": llama_plan("1f1b", 4, 8, recompute="layers"),
        "stage": llama_plan("1f1b", 4, 8, recompute="stage"),
        "replicas": llama_plan("1f1b", 4, 8, replicas="2-2"),
        "zero": llama_plan("1f1b", 4, 8, replicas="2-2", reducer="sharded"),
    }
    for name, plan in plans.items():
        plan.to("deepspeed").save(tmp_path / name)
    deepspeed.run("speed.py", tmp_path, num_ranks=4)
    for name, plan in plans.items():
        reports = reports_in(tmp_path / name)
        assert len(reports) == 4
        copies = max(plan.replicas)
        for rank, report in enumerate(reports):
            assert report["zero"] == (name == "zero")
            assert report["micro_batches"] == 8 // copies
            assert set(report["held"]) == {*plan.stages[rank // copies].layers}
            assert report["loss"] == pytest.approx(report["alone"], rel=1e-5)
            assert not report["wrong"], name
            assert report["moved"] > 1e-4


def test_deepspeed_cuts_as_its_configs_are_read(deepspeed, tmp_path):
    """What ``Plan.of`` works out of a config is what DeepSpeed does."""
    from penstock.planning.handover.deepspeed import balanced, uniform

    cases = [([3, 1, 4, 1, 5, 9, 2, 6], 3), ([1] * 7, 3), ([5, 0, 0, 5], 2), ([8, 1, 1, 1, 1], 4)]
    printed = deepspeed.run("speed_cuts.py", *(f"{parts}:{weights}" for weights, parts in cases))
    wanted = [[balanced(weights, parts), uniform(len(weights), parts)] for weights, parts in cases]
    assert printed.splitlines()[-len(cases) :] == [str(pair) for pair in wanted]
