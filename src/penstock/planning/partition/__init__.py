"""Where to cut a model, and on how many devices each stage runs: pure search over numbers.

Everything begins with a ``LayerGraph`` and a ``Cluster``, and ends with stages: layers and devices
by name or index. Nothing here simulates; whoever asks does.

- ``chain``: exact cuts of a chain into a given number of stages, and the cost models.
- ``layers``: which layers read what, and where a very long model may be cut.
- ``steady/``: stages, replicas and devices with the least steady-state beat (PipeDream).
- ``dapple``, ``dapple_rules``: DAPPLE's planner, its rules and its bound of a synchronous step.
- ``tensor``, ``tensor_layouts``: how the devices of a group share every layer.
- ``placement``, ``placement_space``: layers of a graph with branches on devices, by trials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.planning.partition.chain import (
        COST_MODELS,
        CostModel,
        balance,
        cost_model,
        lightest,
    )
    from penstock.planning.partition.steady import (
        Partition,
        PartitionedStage,
        best_partition,
        evaluate,
    )
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.planning.partition.chain": (
                "COST_MODELS",
                "CostModel",
                "balance",
                "cost_model",
                "lightest",
            ),
            "penstock.planning.partition.steady": (
                "Partition",
                "PartitionedStage",
                "best_partition",
                "evaluate",
            ),
        },
    )

__all__ = [
    "COST_MODELS",
    "CostModel",
    "Partition",
    "PartitionedStage",
    "balance",
    "best_partition",
    "cost_model",
    "evaluate",
    "lightest",
]
