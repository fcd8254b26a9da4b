"""Models of papers on pipeline parallelism, each written as its authors describe it.

Every module has ``build(size)``, a normal ``nn.Module``, and ``example_inputs(rows, size)``. Size
``"paper"`` is the published one, ``"small"`` has the same parts and trains in milliseconds.
"""
