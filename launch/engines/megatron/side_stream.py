"""The stream that a rank works on, which is never the default one.

Gradient accumulators remember the stream that they were made on. A capture forbids the default one (906,
cudaErrorStreamCaptureImplicit), and one beside the step's own would add up gradients while the next replay overwrites
them. PyTorch's advice is to make them on the stream of later passes (torch/csrc/autograd/input_buffer.cpp, the warning of
a mismatch).
"""

from __future__ import annotations

import torch


def use_side_stream() -> torch.cuda.Stream:
    """A stream of the rank's own, from now on the current one."""
    stream = torch.cuda.Stream()
    on_stream(stream)
    return stream


def on_stream(stream: torch.cuda.Stream) -> None:
    """Go on on ``stream`` behind what is under way on the current one: megatron-core 0.16.1 changes it where local graphs
    are built for and where they have been captured (transformer/cuda_graphs.py:1434, :473)."""
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)
