"""A RunSpec in Megatron-Core's own fields; pure, no torch."""
