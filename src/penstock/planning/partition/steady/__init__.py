"""Stages, replicas and devices with the least seconds per microbatch where the pipeline is full.

A graph becomes the ``states`` behind which it may be cut; between two of them lies a stage.
``search`` (``best_partition``) asks ``flat`` first, the exact optimum as if all links and speeds
were equal; where they are not, then for stages on neighbours with the links that they use, and on
regular trees ``levels``, PipeDream's own programme. All answers are a ``Partition``, and
``evaluation`` scores each of them in the same way, with the links that the cluster's tree gives
them; the fastest wins.
"""

from penstock.planning.partition.steady.evaluation import Partition, PartitionedStage, evaluate
from penstock.planning.partition.steady.levels import NestedPartition, levels_of, nested_partition
from penstock.planning.partition.steady.search import best_partition

__all__ = [
    "NestedPartition",
    "Partition",
    "PartitionedStage",
    "best_partition",
    "evaluate",
    "levels_of",
    "nested_partition",
]
