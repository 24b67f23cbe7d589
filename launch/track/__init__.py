"""Send what a sweep records to trackers, in separate processes: Weights & Biases, and TensorBoard's event files."""
