"""AdamW on flat buffers."""
