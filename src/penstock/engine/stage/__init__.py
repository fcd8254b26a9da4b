"""One stage: its layers forward and backward, in one piece, split, sliced, or run again.

``protocol`` is the stage as an engine sees it, and ``stage`` fulfils it with layers. ``layer_runs``
runs its layers in turn, and again where their activations were not kept; ``microbatch_graph`` is
one microbatch's autograd graph, cut at the stage's borders, and ``newest_graph`` the one that is
left where backwards go through the newest activations; ``deferral`` puts weight gradients off until
W, with the formulas of ``deferrable``; ``slices`` is what a slice of a sequence needs of those
before it; ``batch_norm`` keeps the running statistics of whole minibatches.

``compiled_passes`` runs a stage by functions instead of layers: ``stage_function`` is the stage as
a function of tensors, ``passes`` what its traced graph is cut into, ``pass_compilers`` what
compiles that (``backends`` by name), ``conditions`` what must stay as when it was traced.

Decisions:

A stage keeps graph edges, not outputs. Only the edge is needed to start the backward, so a sent
output does not occupy memory until its gradient comes back.

A leaf crosses a border with the ``requires_grad`` that it had; it travels with shapes and strides.
What wanted none on one device wants none here, so kernels are the same, and no gradient goes back
for it: a stage may send back nothing but ``None``, which is a message like any other.

Weight gradients are deferred in the layer's own call, not by walking the finished graph. Between I
and W only the layer's input and its output's gradient are kept, and a stage may end in a view. All
uses of a parameter are queued in the order in which autograd meets them, so sums are equal to the
bit. What is not a linear layer, a convolution or an embedding gets its gradients in I.

A forward that keeps only its input runs with grad mode on and saves nothing, so that both runs use
the same kernels. Buffers change in the first only.

A carry is a skip from one slice to the next. What attention keeps of earlier slices is cut at the
slice's border like a stage's input, so every kind of backward and both ways of recomputing treat it
as they treat skips. A unit of work is a microbatch or a slice of one; units are numbered through,
so messages and losses have one number. Layers say how they work on a slice (``by_position`` or
``forward_slice``), and what does not say so is refused by name: guessing would train another model.

Compiled passes read weights from their modules when they run, and what a forward keeps is a list
of tensors: so versions, recomputation and counted memory need to know nothing of them. The graph of
AOTAutograd is cut here, and not run by ``torch.compile``, whose backward is one piece, and a split
one needs two. Nothing is overwritten inside a pass; buffers are written behind it.

Batch norm's tracking is switched off during microbatches where statistics are those of the
minibatch; a momentum of 0 would let NaN into the buffers.
"""
