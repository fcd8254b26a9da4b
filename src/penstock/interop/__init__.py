"""What other libraries write and read: torch's schedules, PipeDream's profiles."""
