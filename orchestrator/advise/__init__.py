"""`advise`: can graphs help a recipe, what breaks a capture, what to sweep."""
