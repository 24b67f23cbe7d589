"""Initial weights: those of torch_native for the same seed, in the layout of Megatron-Core."""
