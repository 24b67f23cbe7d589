"""The engine in plain PyTorch: a decoder, dense or with experts, for one CPU up to many GPUs."""
