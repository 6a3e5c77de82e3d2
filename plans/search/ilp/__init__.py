"""The exact method: an integer program over classes of placements, closed by enumeration (docs/cost_model.md)."""
