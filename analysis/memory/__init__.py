"""Memory of a rank: measured peaks, and the size of weights, gradients and optimizer state."""
