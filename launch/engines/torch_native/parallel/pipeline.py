"""Pipeline parallelism: run a rank's actions, and send activations and gradients between the ranks of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from launch.engines.torch_native.parallel.pipeline_schedule import (
    SENDS_IN_FLIGHT,
    Action,
    Edge,
    Kind,
    Schedule,
    actions,
    edges,
)
from launch.engines.torch_native.parallel.process_groups import ParallelMesh

Pass = Callable[[int, int, torch.Tensor | None], torch.Tensor | None]
"""A forward pass: (chunk, microbatch, activation) -> activation for the next virtual stage. The input activation is None in the

first virtual stage, and the result is None in the last. The input is a new tensor outside of any autograd graph.
A backward pass: (chunk, microbatch, gradient of the output) -> gradient of the input activation. The output gradient is None in
the last virtual stage, and the result is None in the first."""


@dataclass(frozen=True)
class _SendQueue:
    """Sends on one edge. ``sent`` keeps tensors alive until the receiver has taken them."""

    edge: Edge
    process_group: dist.ProcessGroup
    sent: deque[tuple[torch.Tensor, dist.Work]] = field(default_factory=deque)

    def send(self, tensor: torch.Tensor) -> None:
        work = dist.isend(tensor, self.edge.destination, self.process_group)
        assert work is not None
        self.sent.append((tensor, work))
        self.wait_until(SENDS_IN_FLIGHT)

    def wait_until(self, remaining: int) -> None:
        """Wait until at most ``remaining`` sends are in flight."""
        while len(self.sent) > remaining:
            self.sent.popleft()[1].wait()


class Pipeline:
    """This rank's part of a pipeline. All ranks of the world construct it at the same time, once per run.

    Every edge (a pair of neighbours and a direction) has its own process group, and with NCCL its own communicator and stream.
    Both ends of an edge send and receive in the same order, so transfers on different edges cannot deadlock. The host reads no
    tensor and negotiates no shape, so a step can be captured whole.

    torch.distributed.pipelining (as of 2.13) is not suitable. Its stages call backward(), which accumulates into .grad. Its
    first step reads the result of shape inference on the host. Both directions of a stage share one process group, so looped
    schedules deadlock when captured (pytorch/torchtitan#4591).

    Args:
        mesh: ``mesh.pp`` is the pipeline. A pipeline of one rank has no communication.
        schedule: see :func:`launch.engines.torch_native.parallel.pipeline_schedule.actions`.
        chunks: virtual stages per rank (vpp).
        microbatches: the number of microbatches per step on this rank.
        shape: shape of every activation between virtual stages and of its gradient, the same on every rank of a pipeline.
        dtype: type of every activation and gradient between virtual stages.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        schedule: Schedule,
        chunks: int,
        microbatches: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.actions = actions(schedule, mesh.pp.rank, mesh.pp.size, chunks, microbatches)
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._device = mesh.device
        self._incoming: dict[Kind, tuple[Edge, dist.ProcessGroup]] = {}
        self._outgoing: dict[Kind, _SendQueue] = {}
        for pipeline in mesh.dims.groups("pp"):
            for edge in edges(pipeline, chunks):
                self._connect(edge, mesh.world.rank)

    def run(self, forward: Pass, backward: Pass) -> None:
        """Run one step: every microbatch through this rank's virtual stages, forward and backward."""
        calls: dict[Kind, Pass] = {"forward": forward, "backward": backward}
        next_receive = self._receive(self.actions[0])
        for action, following in zip(self.actions, (*self.actions[1:], None), strict=True):
            # Post the receive of the following action before this action runs, so that the transfer overlaps it.
            receive, next_receive = next_receive, self._receive(following) if following else None
            received = None
            if receive:
                received, work = receive
                # On a GPU only the stream waits. The host goes on.
                work.wait()
            self._send(action, calls[action.kind](action.chunk, action.microbatch, received))
        for outgoing in self._outgoing.values():
            outgoing.wait_until(0)

    def _connect(self, edge: Edge, rank: int) -> None:
        """Create the edge's process group, and transfer a first tensor if this rank is at one of its ends.

        NCCL connects two ranks at their first transfer, where each waits for the other. All ranks connect here in the same
        order, so the connection cannot deadlock in the first step or happen inside a capture.
        """
        name = f"pipeline {edge.kind} {edge.source} to {edge.destination}"
        process_group = dist.new_group([edge.source, edge.destination], group_desc=name)
        first = torch.zeros(1, dtype=self.dtype, device=self._device)
        if rank == edge.source:
            self._outgoing[edge.kind] = _SendQueue(edge, process_group)
            dist.send(first, edge.destination, process_group)
        elif rank == edge.destination:
            self._incoming[edge.kind] = edge, process_group
            dist.recv(first, edge.source, process_group)

    def _receive(self, action: Action) -> tuple[torch.Tensor, dist.Work] | None:
        """Post the receive of the input of ``action``, a tensor of ``shape`` and ``dtype``. Return the tensor and its work."""
        if not action.receives:
            return None
        edge, process_group = self._incoming[action.kind]
        # Use a new buffer each time, because an activation lives until its backward pass.
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        work = dist.irecv(tensor, edge.source, process_group)
        assert work is not None
        return tensor, work

    def _send(self, action: Action, result: torch.Tensor | None) -> None:
        assert (result is not None) == action.sends, action
        if result is None:
            return
        assert result.shape == self.shape and result.dtype == self.dtype, (action, result.shape, result.dtype)
        self._outgoing[action.kind].send(result.detach().contiguous())
