"""AReaL-Hex's scheduler for asynchronous jobs (arXiv 2511.00796), with the repairs that its printed form needs."""
