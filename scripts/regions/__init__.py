"""Regions on one computer: a network namespace and an S3 server each, joined by links as a cluster file says."""
