"""Search for placements: one protocol, one registry, one file per method and operator (`plans.search.planner`)."""
