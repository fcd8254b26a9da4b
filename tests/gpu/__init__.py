"""What only hardware can show; `make gpu` runs it, and every test of it says why it was skipped."""
