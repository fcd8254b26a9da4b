"""Where to cut a model, and on how many devices each stage runs."""

from penstock.partition.chain import balance, lightest
from penstock.partition.cost_models import COST_MODELS, CostModel, cost_model
from penstock.partition.evaluation import Partition, PartitionedStage, evaluate
from penstock.partition.search import best_partition

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
