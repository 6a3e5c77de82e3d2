"""Input documents of the planner: cluster and job, their value types and the one loader."""
