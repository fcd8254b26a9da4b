"""Expert parallelism: copies of a stage divide the experts of its mixtures among themselves.

Each copy has the weights of some experts only, and computes what its microbatches do with all other
layers. When a mixture comes, tokens travel to the copies that have their experts, and back
(``dispatch``); what a stage has of its experts is ``divided``. What experts are is found in
``engine.model.experts``.

Decisions:

Tokens of all copies' microbatches come to an expert at once, so its gradient is the sum over them
as soon as all copies have gone back, and no sum follows; every other weight is summed as without
experts. All copies run the same ops in the same order (``planning.plans.lockstep``), and each joins
in every exchange, also with no tokens: a copy that has nothing to compute still has a graph to go
back through, or the others would wait for it.
The experts' own code computes: a twin of the module with the rows that are here and as many experts
is given the tokens that have come, each with one choice, and its weight. So activations, biases and
where weights are multiplied stay what they are, whatever the model.
"""
