"""What it costs to save and to go on."""
