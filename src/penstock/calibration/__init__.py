"""Profile a model: its layers alone, then how much longer ranks of one machine take for them.

``profiling`` has ``profile``. It lets ``penstock.profiler`` measure every layer while nothing else
works. Then real pipelines train a copy of the model for a few steps (``runs``): one with whole
backwards, one with split ones and one without a flush, in turns with the layers alone, round by
round until the figures are steady (``calibrating``). How much longer than the planner foresees
their steps and updates take is the profile's ``contention`` (``fit``); rounds in which something
else disturbed them (``disturbance``) do not count (``judgement``).
"""

from penstock.calibration.profiling import profile

__all__ = ["profile"]
