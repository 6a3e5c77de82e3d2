"""Parts of the accelerate training engine: packing, forward pass, optimizer steps, resume points and ranks."""
