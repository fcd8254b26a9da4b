"""Who drives the ranks: ``threads`` of one process, or this process's own among ``processes``, with
what these report to each other at the end of a step.

Both keep to ``driver``. ``joining`` is where processes meet, beside the channels of their ranks.
"""
