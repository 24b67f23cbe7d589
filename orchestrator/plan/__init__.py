"""Decide what will run and what will not, before anything is submitted."""
