"""Checkpoint files in the layout of Hugging Face transformers: what they must hold, and what they hold."""
