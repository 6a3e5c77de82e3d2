"""The cost model as machine code (numba), for searches. Imported by functions only: importing it takes a second."""
