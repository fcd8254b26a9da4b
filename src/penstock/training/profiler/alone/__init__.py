"""Measure the layers of a model, in place, while nothing else works.

``measure_alone`` (``measuring``) is the entrance. ``passes`` makes functions of layers and times
passes through them, with the graph cut between them or through all of them as one; ``rounds`` lets
all kinds of pass take turns and takes medians; ``overheads`` measures what comes on top of layers.
``bench`` does all that with one sample after another, counts memory and says what is odd.
``conditions`` has the sample and the clock, and leaves everything as it was.
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
