"""One stage: its layers forward and backward, in one piece, split, sliced, or run again.

``stage`` is what an engine calls. ``layer_runs`` runs its layers in turn, and again where their
activations were not kept; ``microbatch_graph`` is one microbatch's autograd graph, cut at the
stage's borders; ``deferral`` puts weight gradients off until W, with the formulas of
``deferrable``; ``slices`` is what a slice of a sequence needs of those before it; ``batch_norm``
keeps the running statistics of whole minibatches.
"""
