"""Models of papers on pipeline parallelism, each written as its authors describe it.

Every module has ``build(size, width)``, a normal ``nn.Module``; ``batch(rows, size, generator)``,
inputs and targets that can be learned, from ``data``; and ``loss(output, targets)``. Size
``"paper"`` is the published one, ``"small"`` has the same parts and trains in milliseconds.
"""
