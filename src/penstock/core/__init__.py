"""The values that everything is said in: models as graphs, clusters, schedules, weight versions, timelines, sums."""
