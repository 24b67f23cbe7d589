"""Print a cell as the settings of other programs, and read their flags as a recipe."""
