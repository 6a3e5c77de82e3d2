"""Pictures of plans and simulations (matplotlib, loaded when one is drawn)."""
