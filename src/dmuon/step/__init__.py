"""One step, as the plan says."""
