"""Objects that a script holds: pipelines, streams, the loop around them, checkpoints, profiles,
jobs."""
