"""Translate a RunSpec to Megatron-Core's own fields. Pure, without torch."""
