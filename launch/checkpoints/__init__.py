"""Checkpoints in the layout of Hugging Face's transformers, as files: what they must hold, and what they do."""
