"""Send a sweep's records to trackers (Weights & Biases, TensorBoard's event files), in separate processes."""
