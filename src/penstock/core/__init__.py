"""What everything is said in: models, clusters, schedules, weight versions, timelines, sums."""
