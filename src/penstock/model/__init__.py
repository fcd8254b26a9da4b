"""What a user hands in, and what a pipeline must know of it.

``spine`` is a model as a chain of layers with skips beside it; ``tree`` walks nested values (the
only file that knows torch's private helpers for that) and ``copying`` copies them with their
strides; ``microbatches`` cuts a minibatch and weights its loss; ``randomness`` gives every layer
and microbatch a stream of its own; ``replay`` runs a module a second time as if it were the first;
``optimizer_factory`` makes a user's optimizer of a stage's parameters.
"""
