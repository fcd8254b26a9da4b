"""What takes minutes, for ``make soak`` alone: long runs, and random faults by the hundred."""
