"""Checkpoint files in the layout of Hugging Face transformers: their required and their actual content."""
