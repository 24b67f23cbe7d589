"""Token files: text and Megatron's indexed data sets; no torch."""
