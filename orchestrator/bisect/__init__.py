"""`bisect`: find the smallest captured set that fails, or the first layer that differs."""
