"""Who drives the ranks: ``threads`` of one process, or this process's own among ``processes``.

Both keep to ``driver``. ``joining`` is how processes meet before a pipeline is built, ``board`` is
where they say why they failed, ``clocks`` puts several hosts on one time axis.
"""
