"""The loops that proofs compare with; they share no code with the engine.

``single_device`` trains in one piece what a pipeline trains in several. ``delayed_replay``, on the
chain of ``replayed_stage``, is the sequential training that an asynchronous pipeline must equal:
the same gradients, as old as its policy makes them. ``sideways_replay`` is what learning from a
live stream must equal: gradients go through the graphs of newer frames.
"""
