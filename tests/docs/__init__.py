"""What the documents show is run from top to bottom, as a reader would."""
