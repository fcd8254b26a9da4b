"""What a script holds: pipelines and streams, the loop around them, checkpoints, profiles, rehearsals, supervised jobs."""
