"""The stream of a rank's work, which is never the default stream.

Gradient accumulators keep the stream on which they were created. A capture forbids the default stream (906,
cudaErrorStreamCaptureImplicit). An accumulator on a different stream than the step's would add gradients while the next replay
overwrites them. PyTorch advises to create accumulators on the stream of later passes (torch/csrc/autograd/input_buffer.cpp).
"""

from __future__ import annotations

import torch


def use_side_stream() -> torch.cuda.Stream:
    """Make a new stream the current one, and return it."""
    stream = torch.cuda.Stream()
    on_stream(stream)
    return stream


def on_stream(stream: torch.cuda.Stream) -> None:
    """Switch to ``stream``, which first waits for the current stream.

    megatron-core 0.16.1 changes the current stream when it prepares local graphs and after it has captured them
    (transformer/cuda_graphs.py:1434, :473).
    """
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)
