"""Measure a model layer by layer, in place.

The whole room is ``profile`` (``measuring``). ``chain`` makes functions of layers, ``passes`` runs
them by a ``clock`` with the graph cut between them, ``rounds`` lets all kinds of pass take turns
and makes medians of them, beside ``neighbours`` that keep the other cores busy; ``overheads`` is
what comes on top of layers, ``workspace`` and ``penstock.footprint`` count memory, ``flags`` says
what is odd, ``bench`` does all that with one ``sample``, and ``conditions`` leaves everything as it
was.
"""

from penstock.profiler.bench import Progress
from penstock.profiler.measuring import profile
from penstock.profiler.overheads import OptimizerFactory, measure_hand_over

__all__ = ["OptimizerFactory", "Progress", "measure_hand_over", "profile"]
