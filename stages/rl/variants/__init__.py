"""Named variants of policy optimisation: one file each, joined in `registry`."""
