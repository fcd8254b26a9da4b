"""From a graph and a cluster to a plan; nothing here imports torch."""
