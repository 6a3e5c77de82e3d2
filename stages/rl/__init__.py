"""Numerics of policy optimisation: advantages in numpy, losses in torch."""
