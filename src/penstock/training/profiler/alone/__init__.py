"""Measure the layers of a model, in place, while nothing else works.

``measure_alone`` (``measuring``) is the entrance. ``chain`` makes functions of layers, ``passes``
times them by a ``clock`` with the graph cut between them, ``rounds`` lets all kinds of pass take
turns and takes medians; ``overheads`` measures what comes on top of layers, ``workspace`` and
``footprint`` count memory, ``flags`` says what is odd, ``bench`` does all that with one
``sample``, ``uncut`` times the whole model for comparisons, and ``conditions`` leaves everything as
it was.
"""

from penstock.training.profiler.alone.bench import Progress
from penstock.training.profiler.alone.conditions import Sample, device_of
from penstock.training.profiler.alone.measuring import measure_alone
from penstock.training.profiler.alone.overheads import measure_hand_over
from penstock.training.profiler.alone.passes import Alone, measure_uncut
from penstock.training.profiler.alone.rounds import LONG_SECONDS, WARM_UP

__all__ = [
    "LONG_SECONDS",
    "WARM_UP",
    "Alone",
    "Progress",
    "Sample",
    "device_of",
    "measure_alone",
    "measure_hand_over",
    "measure_uncut",
]
