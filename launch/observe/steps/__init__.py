"""The observations of each training step: its optimizers, its phase, its time, its loss and gradient norm."""
