"""`export`: a cell in the words of other programs."""
