"""The engine in plain PyTorch: a decoder, dense or mixture of experts, that runs from a laptop's CPU to many GPUs."""
