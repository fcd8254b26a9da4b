"""Who drives the ranks: ``threads`` of one process, or this process's own among ``processes``.

Both keep to ``driver``. ``joining`` is where processes meet, beside the channels of their ranks;
``reports`` are what they tell each other at the end of a step.
"""
