"""The engine in plain PyTorch: a decoder, dense or with experts, from one CPU to many GPUs."""
