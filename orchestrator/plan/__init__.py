"""What would run and what not, decided before anything is submitted."""
