"""What takes minutes and runs in ``make soak`` alone: long runs, and random faults by the hundred."""
