"""Who drives the ranks: ``threads`` of one process, or this process's own among ``processes``.

Both keep to ``driver``. ``joining`` is how processes meet before a pipeline is built, ``offers``
what they agree on there, ``clocks`` puts several hosts on one time axis, and on the ``board``
stands why a rank has failed.
"""
