"""How the devices of a group share every layer of a model (tensor and data parallelism).

``layouts`` says in which ways a layer can be shared, and what its values cost to hand around;
``layout_search`` finds the fastest way for all layers together; ``split`` (``split_layers``) hands
it out, with the model as one device of the group sees it.
"""

from penstock.planning.partition.tensor.layouts import LayerSplit, TensorLayout
from penstock.planning.partition.tensor.split import TensorSplit, split_layers

__all__ = ["LayerSplit", "TensorLayout", "TensorSplit", "split_layers"]
