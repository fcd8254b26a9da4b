"""Words in which all is said: models, clusters, schedules, weight versions, timelines, sums."""
