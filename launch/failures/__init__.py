"""Derive the outcome and the fix of an attempt from its records."""
