"""The `motley` command."""
