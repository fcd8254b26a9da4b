"""NeMo AutoModel takes recipes that are written for it, cuts a Llama of transformers by them and
trains it with the losses and gradients of the whole model."""

import pytest

from tests.engines.conftest import reports_in
from tests.kit.transformer import layers_on, llama_names, llama_plan, modules_of

SCHEDULES = "1f1b", "interleaved-1f1b", "zb-v", "v-half"


@pytest.mark.timeout(600)
def test_automodel_trains_by_plans_as_one_device(automodel, tmp_path):
    names = llama_names(prefix="model.")
    plans = {name: llama_plan(name, 2, 4, names=names) for name in SCHEDULES}
    for name, plan in plans.items():
        plan.to("automodel").save(tmp_path / name)
    automodel.run("auto.py", tmp_path, num_ranks=2)
    for name, plan in plans.items():
        reports, schedule = reports_in(tmp_path / name), plan.build_schedule()
        assert len(reports) == 2
        for rank, report in enumerate(reports):
            assert not report["wrong"], name
            assert report["largest"] > 1e-4
            assert report["order"] == [str(op) for op in schedule.ranks[rank]]
            held = modules_of(report["parameters"], names)
            assert held == layers_on(plan, rank)
        losses = [report["losses"] for report in reports if report["losses"]]
        assert losses == [pytest.approx(reports[0]["alone"], rel=1e-5)]


def test_automodels_recipe_says_replicas_tensor_ranks_and_recomputation(automodel, tmp_path):
    names = llama_names(prefix="model.")
    plan = llama_plan("1f1b", 4, 4, names=names, replicas="2-2", reducer="sharded")
    plan.recomputing("layers").to("automodel").save(tmp_path)
    automodel.run("auto_sizes.py", tmp_path)
    (report,) = reports_in(tmp_path)
    assert report == {
        "dp_size": 2, "dp_replicate_size": 1, "pp_size": 2, "tp_size": 1, "checkpointing": True,
        "batch": 2, "microbatch": 1,
    }  # fmt: skip
