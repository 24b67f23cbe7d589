"""Tests of the differences between curves, one a file. The rungs of a verdict ask them."""
