"""The results of a whole sweep, cell by cell and over all cells."""
