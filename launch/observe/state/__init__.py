"""The program's training state: its optimizers, its gradients, and what its modules keep that no optimizer steps."""
