"""Megatron-Core reads what is written for it, and its own models have the layers that plans say."""

import re

import pytest

from penstock.planning.handover.modules import block_layout
from tests.engines.conftest import reports_in
from tests.kit.transformer import llama_names, llama_plan


def expected(plan, rank):
    """The stages of a rank, as the job reports them."""
    blocks = block_layout(plan)
    last = len(plan.stages) - 1
    first_block = [sum(blocks.blocks[:index]) for index in range(last + 1)]
    return [
        {
            "embedding": index == 0,
            "blocks": [*range(first_block[index], first_block[index] + blocks.blocks[index])],
            "head": index == last,
            "norm": index == last,
        }
        for index, stage in enumerate(plan.stages)
        if stage.rank == rank
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_megatrons_models_have_the_layers_of_the_plan(megatron, ranks, tmp_path):
    plans = {
        "1f1b": llama_plan("1f1b", ranks, 2 * ranks),
        "deep": llama_plan("1f1b", ranks, 2 * ranks, names=llama_names(40)),
        "interleaved": llama_plan("interleaved-1f1b", ranks, 2 * ranks),
        "loops": llama_plan(
            "interleaved-1f1b:stages_per_rank=4", ranks, 2 * ranks, names=llama_names(24)
        ),
        "v": llama_plan("zb-v", ranks, 2 * ranks),
        "recompute": llama_plan("1f1b", ranks, 2 * ranks, recompute="layers"),
    }
    handed = {name: plan.to("megatron") for name, plan in plans.items()}
    for name, value in handed.items():
        value.save(tmp_path / name)
    megatron.run("mcore.py", tmp_path, num_ranks=ranks)
    for name, value in handed.items():
        reports = reports_in(tmp_path / name)
        assert len(reports) == ranks
        for rank, report in enumerate(reports):
            assert report["stages"] == expected(value.plan, rank), name
            assert report["recompute"] == ("full" if name == "recompute" else None)
    repeated = re.compile(r"\(t\*\d+\|\)\*\d")
    assert any(repeated.search(str(value)) for value in handed.values())
