"""Where a run's first weights come from, one file per type of source; a job's shape is checked against the model."""
