"""Loops, checkpoints and profiles of other libraries: Hugging Face's, Lightning's, torch's,
PipeDream's.
"""
