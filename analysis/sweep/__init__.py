"""What came of a whole sweep, cell by cell and over its cells."""
