"""Mutations of the evolutionary search, one operator per file (`plans.search.mutations.registry`)."""
