"""The policy's trainer on megatron-core: tensor, pipeline and data parallel; see docs/architecture.md."""
