"""``Pipeline``: trains a model as a plan says, with the results of one device.

``running`` is a pipeline that has been built: one thing at a time runs in it, and it tells of its
last step; ``habits`` says what does what people try on it. ``state`` adds weights and checkpoints,
``pipeline`` training and evaluating.
"""

from penstock.training.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
