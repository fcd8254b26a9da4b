"""Profile a model: its layers alone, then how much longer ranks of one machine take for them.

``profiling`` has ``profile``. It lets ``alone`` measure every layer while nothing else works. Then
real pipelines train a copy of the model for a few steps (``runs``), in turns with the layers alone,
round by round until the figures are steady (``calibrating``). How much longer than foreseen their
steps and updates take is the profile's ``contention``; rounds in which something else disturbed
them (``disturbance``) do not count.

Decisions:

Contention is measured by real pipelines. Ranks of one host share caches, memory and, as threads,
the interpreter; they wait and wake up; versions of weights are copied. Copies of the model that
kept other cores busy showed a third of that: deferring weight gradients is work in Python, which
only other Python work slows, and no copy ever waits. So ``profile`` runs three short pipelines,
whole backwards, split ones and no flush, and keeps the factor with which the planner's own
``Candidate`` gives the step that was measured. It counts where a plan uses several devices of a
host. One run is one throw of the dice (1.36 and 1.04 within a minute), so runs take turns with the
layers alone, round by round, until their medians are steady. Which rounds count is decided by what
others had of the cores and by fixed work, never by the times themselves.
"""

from penstock.training.profiler.profiling import profile

__all__ = ["profile"]
