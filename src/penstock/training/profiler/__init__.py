"""Profile a model: its layers alone, then how much longer ranks of one machine take for them.

``profiling`` has ``profile``. It lets ``alone`` measure every layer while nothing else works, and
``together`` measure real pipelines of a copy of the model. How much longer these take than the
planner foresees is the profile's ``contention``.
"""

from penstock.training.profiler.profiling import profile

__all__ = ["profile"]
