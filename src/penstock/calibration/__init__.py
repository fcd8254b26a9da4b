"""Profile a model: its layers alone, then how much longer ranks of one machine take for them.

``profiling`` has ``profile``. It lets ``penstock.profiler`` measure every layer while nothing else
works, and then real pipelines train copies of the model for a few steps (``runs``): one with whole
backwards, one with split ones and one without a flush. How much longer than the simulator foresees
their steps and updates take is the profile's ``contention`` (``fit``).
"""

from penstock.calibration.profiling import profile

__all__ = ["profile"]
