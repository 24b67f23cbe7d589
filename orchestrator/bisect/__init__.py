"""`bisect`: the smallest captured set, and the first layer, that fail."""
