"""Pipeline parallelism: runs a rank's actions and passes activations and gradients between the ranks of a pipeline.

Why not torch.distributed.pipelining (as of 2.13): its stages differentiate by backward(), which accumulates into .grad;
the first step has the ranks vote on shape inference and reads the result on the host; and a stage's transfers in both
directions share one process group, so that looped schedules deadlock when captured (pytorch/torchtitan#4591).

Here every edge, that is every pair of neighbours and direction of data, has a process group of its own, and with NCCL a
communicator and a stream; a rank is at an end of four at most. Sends and receives on an edge are in the same order at
both ends (a property of the schedules), so none can wait for one on another edge that waits for it. Nothing is read by
the host and no shape is negotiated: a step can be captured whole.
"""

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

Forward = Callable[[int, int, torch.Tensor | None], torch.Tensor | None]
"""(chunk, micro-batch, activation) -> the activation that the next virtual stage takes. The activation is None into the
first virtual stage and out of the last. It is a fresh tensor outside of any autograd graph."""
Backward = Callable[[int, int, torch.Tensor | None], torch.Tensor | None]
"""(chunk, micro-batch, gradient of the output) -> the gradient of the input activation. The gradient is None into the
last virtual stage and out of the first."""


@dataclass(frozen=True)
class _Arrival:
    """A receive under way."""

    tensor: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class _Outgoing:
    """This rank's end of an edge on which it sends. ``sent`` keeps tensors alive until they have been taken."""

    edge: Edge
    process_group: dist.ProcessGroup
    sent: deque[tuple[torch.Tensor, dist.Work]] = field(default_factory=deque)

    def send(self, tensor: torch.Tensor) -> None:
        work = dist.isend(tensor, self.edge.destination, self.process_group)
        assert work is not None
        self.sent.append((tensor, work))
        self.settle(SENDS_IN_FLIGHT)

    def settle(self, remaining: int) -> None:
        """Wait until at most ``remaining`` sends are under way."""
        while len(self.sent) > remaining:
            self.sent.popleft()[1].wait()


class Pipeline:
    """This rank's part of a pipeline; made once a run, by all ranks of the world at the same time.

    Args:
        mesh: ``mesh.pp`` is the pipeline. A pipeline of one rank accumulates over micro-batches, without communication.
        schedule: see :func:`launch.engines.torch_native.parallel.pipeline_schedule.actions`, whose demands hold here.
        chunks: virtual stages a rank (vpp).
        micro_batches: of a step, on this rank.
        shape: of every activation between virtual stages, and so of its gradient; the same on every rank of a pipeline.
        dtype: of every activation and gradient between virtual stages.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        schedule: Schedule,
        chunks: int,
        micro_batches: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.actions = actions(schedule, mesh.pp.rank, mesh.pp.size, chunks, micro_batches)
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._device = mesh.device
        self._incoming: dict[Kind, tuple[Edge, dist.ProcessGroup]] = {}
        self._outgoing: dict[Kind, _Outgoing] = {}
        for pipeline in mesh.dims.groups("pp"):
            for edge in edges(pipeline, chunks):
                self._join(edge, mesh.world.rank)

    def run(self, forward: Forward, backward: Backward) -> None:
        """One step: every micro-batch through this rank's virtual stages, forward and backward.

        A receive is posted before the action ahead of the one that needs it, so that the transfer overlaps the
        computation. On a GPU the host waits for nothing: ``Work.wait`` makes the stream wait.
        """
        calls: dict[Kind, Forward | Backward] = {"forward": forward, "backward": backward}
        coming = self._receive(self.actions[0])
        for action, following in zip(self.actions, (*self.actions[1:], None), strict=True):
            arrival, coming = coming, self._receive(following) if following else None
            received = arrival.wait() if arrival else None
            self._send(action, calls[action.kind](action.chunk, action.micro_batch, received))
        for outgoing in self._outgoing.values():
            outgoing.settle(0)

    def _join(self, edge: Edge, rank: int) -> None:
        """Make the edge's process group, and pass a first tensor where this rank is at an end of it.

        NCCL connects two ranks at their first transfer, where each waits for the other: done here, in an order that is
        the same on every rank, it can neither deadlock in the first step nor fall into a capture.
        """
        name = f"pipeline {edge.kind} {edge.source} to {edge.destination}"
        process_group = dist.new_group([edge.source, edge.destination], group_desc=name)
        first = torch.zeros(1, dtype=self.dtype, device=self._device)
        if rank == edge.source:
            self._outgoing[edge.kind] = _Outgoing(edge, process_group)
            dist.send(first, edge.destination, process_group)
        elif rank == edge.destination:
            self._incoming[edge.kind] = edge, process_group
            dist.recv(first, edge.source, process_group)

    def _receive(self, action: Action) -> _Arrival | None:
        """Post the receive of what ``action`` takes, into a buffer of its own: an activation lives until its backward."""
        if not action.receives:
            return None
        edge, process_group = self._incoming[action.kind]
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        work = dist.irecv(tensor, edge.source, process_group)
        assert work is not None
        return _Arrival(tensor, work)

    def _send(self, action: Action, result: torch.Tensor | None) -> None:
        assert (result is not None) == action.sends, action
        if result is None:
            return
        assert result.shape == self.shape and result.dtype == self.dtype, (action, result.shape, result.dtype)
        self._outgoing[action.kind].send(result.detach().contiguous())
