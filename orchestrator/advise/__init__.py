"""`advise`: find whether graphs can help a recipe, what breaks a capture, and what to sweep."""
