"""Memory of a rank: measured peaks, and what weights and optimizer take."""
