"""Load the records of a sweep into dataclasses."""
