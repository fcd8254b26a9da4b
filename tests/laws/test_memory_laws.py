"""What a rank's memory is spent on adds up to its predicted peak, whatever the plan is."""

from __future__ import annotations

from math import ceil, inf

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Tier
from penstock.planning.planner import plan
from tests.kit.examples import examples
from tests.kit.planning import clusters, graphs

FAMILIES = (
    "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "pipedream", "pipedream-2bw",
)  # fmt: skip


@examples(10)
@given(
    graph=graphs(most=8),
    cluster=clusters(shared=st.just(0)),  # refusals for that take seconds
    family=st.sampled_from(FAMILIES),
    recompute=st.sampled_from(("never", "stage", "layers")),
    reducer=st.sampled_from(("owners", "sharded")),
    spills=st.booleans(),
    slack=st.sampled_from((0.0, 0.25)),
)
def test_the_parts_of_a_ranks_memory_are_its_peak(
    graph, cluster, family, recompute, reducer, spills, slack
):
    listed = tuple(replace(device, allocator_slack=slack) for device in cluster.devices)
    cluster = replace(cluster, devices=listed)
    options = {"schedule": family, "recompute": recompute, "reducer": reducer}
    if spills:
        options = {"spill": "always"}
        cluster = replace(cluster, tiers=(Tier(kind="host"),))
    try:
        made = plan(graph, cluster, microbatches=4, **options)
    except (InputError, PlanError):
        assume(False)
    parts = made.memory_parts
    tensors = [own.total - own.allocator for own in parts]
    assert [own.total for own in parts] == [ceil(size * (1 + slack)) for size in tensors]
    limits = [device.memory_bytes or inf for device in made.devices]
    assert all(held <= limit for held, limit in zip(made.rank_bytes, limits, strict=True))
    assert tuple(own.total for own in parts) == made.rank_bytes
    assert all(size >= 0 for own in parts for size in own)
    for own, stages in zip(parts, made.placement.stages_of, strict=True):
        held = [made.stages[stage] for stage in stages]
        assert own.recomputed == 0 or any(stage.recompute == "stage" for stage in held)
        if made.spill is None:
            state = sum(stage.state_bytes for stage in held)
            assert own.activations + own.recomputed == own.total - own.allocator - state
