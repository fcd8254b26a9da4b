"""``Degrees``: the numbers that every engine asks for, of a plan that it performs as it is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from penstock.planning.handover.capabilities import capabilities_of
from penstock.planning.handover.properties import Placement, placement
from penstock.planning.plans import Plan

_SHARDING = frozenset({"sharded"})


class Degrees(NamedTuple):
    """The degrees of a plan.

    Attributes:
        pipeline: ranks of one copy of the pipeline.
        stages_per_rank: virtual stages of each of them.
        placement: how stages lie on them.
        data: copies of the pipeline.
        is_sharded: whether copies share the optimizer's state.
        tensor: devices that share every layer.
        experts: copies that divide experts.
        is_sequence: whether they divide the sequence between layers.
        microbatches: of each copy, per step.
        microbatch_size: rows; 1 where nobody says.
        recomputes: whether blocks run forward twice.
    """

    pipeline: int
    stages_per_rank: int
    placement: Placement
    data: int
    is_sharded: bool
    tensor: int
    experts: int
    is_sequence: bool
    microbatches: int
    microbatch_size: int
    recomputes: bool

    @property
    def local_batch_size(self) -> int:
        """Rows of a step in each copy."""
        return self.microbatches * self.microbatch_size


def degrees_of(plan: Plan) -> Degrees:
    """The degrees of a plan whose stages all have as many replicas and tensor ranks."""
    copies = max(plan.replicas)
    ranks = plan.num_ranks // copies
    return Degrees(
        pipeline=ranks,
        stages_per_rank=len(plan.stages) // ranks,
        placement=placement(plan),
        data=copies,
        is_sharded=plan.summing.reducer in _SHARDING,
        tensor=plan.num_tensor_ranks,
        experts=max(stage.expert_ranks for stage in plan.stages),
        is_sequence=any("sequence" in stage.splits.values() for stage in plan.stages),
        microbatches=plan.num_microbatches // copies,
        microbatch_size=plan.microbatch_size or 1,
        recomputes=any(stage.recompute != "none" for stage in plan.stages),
    )


def head_of(engine: str) -> str:
    """What stands at the head of a file: whose it is, and for which version of the engine."""
    able = capabilities_of(engine)
    return f"A plan of Penstock's for {able.title} {able.version}"


def notes_of(plan: Plan, engine: str) -> tuple[str, ...]:
    """What a plan leaves open, or an engine decides by itself, in sentences."""
    able = capabilities_of(engine)
    notes = []
    rule = able.tensor_rule
    if not plan.microbatch_size:
        notes.append(
            "the plan does not say how many rows a microbatch has; 1 is written, give yours"
        )
    if plan.num_tensor_ranks > 1:
        notes.append(
            f"{able.title} divides layers by a plan of its own, not as the stages' splits say, for "
            f"which times were predicted{'; ' * bool(rule)}{rule}"
        )
    return tuple(notes)


CLASSES: dict[Placement, str] = {
    "straight": "1F1B", "loop": "Interleaved1F1B", "v": "ZBVZeroBubble",
}  # fmt: skip
"""For each placement, a schedule of torch's whose stages lie so: by its name, torchtitan and NeMo
AutoModel decide which rank has which stage, also where a CSV has the order."""


def rows_of(items: Iterable[object], indent: str = "") -> str:
    """A list in Python with a line for each of its items, as people read and edit it."""
    rows = "".join(f"{indent}    {json.dumps(item)},\n" for item in items)
    return f"[\n{rows}{indent}]"
