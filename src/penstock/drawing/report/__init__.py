"""The report of a training run: the values it is made of, and its page."""
