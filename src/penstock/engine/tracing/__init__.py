"""Models that are no chain: traced, cut in execution order, run as a chain of layers.

``capture`` is the entrance. A traced graph (``graphs``) is cut where modules are called
(``segments``, which say what passes between the layers, too), and ``layers`` makes modules of the
pieces that hold the model's own parameters; ``inputs`` is what goes into the first of them. Modules
without children stay whole (``exports``), and so do those whose code no graph can hold
(``hidden``). Before anyone uses the result, it is run beside the model (``proof``), and what a
trace does not see is looked for (``unseen``). A model that cannot be traced is told by the line of
its own code and what to write there instead (``lines``).

``joint`` is another trace: a function's forward and backward as one graph of operations, which
``graph_parts`` cuts into what runs one after the other.

Decisions:

Captured layers keep the model's own modules and keys. Modules without children stay calls, so batch
norm, dropout, hooks and split backward work as ever; parameters are the model's own objects, so
training the captured model trains the original.
"""

from penstock.engine.tracing.captured import Captured, capture
from penstock.engine.tracing.layers import CapturedLayer

__all__ = ["Captured", "CapturedLayer", "capture"]
