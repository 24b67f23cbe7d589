"""Print what a person reads on the terminal."""
