"""Print a cell as settings of other programs."""
