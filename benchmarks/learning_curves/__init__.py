"""Learning curves of whole runs over seeds."""
