"""The loop around a pipeline, for those who do not want to write it, and who looks on in it.

``fit`` is no second engine: it calls ``Pipeline.steps`` and ``Pipeline.evaluate_loss``, as
anybody's own loop would, and a loop of one's own may call the same callbacks. Under ``torchrun``
every process runs it. Whether to stop is decided together behind an evaluation, where nothing is
under way.
"""
