"""Clusters and jobs of published evaluations, and generators of clusters of any size. Values only: no files."""
