"""Four accelerators in software."""
