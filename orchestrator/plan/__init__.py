"""Decide what would run and what would not, before anything is submitted."""
