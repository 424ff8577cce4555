"""Interprets a rank's program: one handler for each kind of action.

In: the compiled stage of this rank, the edges, a program (tuple of actions) and a `StepState`. Out: the state
after the program: sums, row outputs, gradients. There is no autograd here: forward and backward are
callables, saved values are explicit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from rannc_backend.ir.action import INPUT, OUTPUT, Action, ActionKind, Channel, Program
from rannc_backend.ir.exchange import Edge, Value
from rannc_backend.ir.plan_checks import lane_text
from rannc_backend.kernels.message_layout import MessageLayout, Wire
from rannc_backend.kernels.record_table import CopyReport
from rannc_backend.runtime.comm.host_link import HostLink, StageParameters
from rannc_backend.runtime.gradients.buckets import StageGradients
from rannc_backend.runtime.rows import Piece
from rannc_backend.runtime.step.messages import (
    Incoming,
    RowsTensors,
    assemble,
    layout_of,
    make_incoming,
    make_message,
    slice_rows,
    wires_of,
)
from rannc_backend.runtime.step.send_buffers import SendBuffers
from rannc_backend.runtime.step.step_state import OLD_VALUE, Destinations, Stage, StageSlot, StepState
from rannc_backend.runtime.torch_internals import storage_key
from rannc_backend.runtime.trace.copy_report import BUCKETS, MESSAGES
from rannc_backend.runtime.trace.meter import StepRecord
from rannc_backend.runtime.world import QueuedMessage, World

_Key = TypeVar("_Key")
_MAX_LAYOUTS = 1024  # of messages: channels, times numbers of rows


@dataclass(slots=True, kw_only=True)
class Executor:
    """Plays this rank's part. ``tensors`` holds parameters and buffers by the placeholder names of its stages.

    ``stages``: those of its lane, by index. A rank that the plan has no work for has none; it only hands out inputs and
    takes outputs.
    ``made_buffers``: by stage, the placeholders of the buffers whose new values it makes.
    ``host_link``: where parameters lie on the host, and stages read copies of them.
    ``examples``: in a rehearsal, where nothing arrives, a row for each value that is known, as [1, elements];
    zeros for the others.
    ``boundary_wire``: how floating values travel between stages.
    """

    world: World
    stages: Mapping[int, Stage]
    edges: Mapping[tuple[int, int], Edge]
    tensors: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    parameter_names: Mapping[str, str]
    updated_buffers: frozenset[str]
    made_buffers: Mapping[int, frozenset[str]] = field(default_factory=dict)
    limit_seconds: float
    send_buffers: SendBuffers
    examples: Mapping[str, torch.Tensor] | None = None
    host_link: HostLink | None = None
    boundary_wire: Wire = Wire.SAME
    _copies: StageParameters | None = field(default=None, init=False)
    _handlers: dict[ActionKind, Callable[[Action, StepState], None]] = field(default_factory=dict, init=False)
    _num_readers: dict[str, int] = field(default_factory=dict, init=False)
    _old_buffers: set[str] = field(default_factory=set, init=False)  # read by one stage, made by another
    # By stage: names of parameters, and for which positions.
    _names: dict[int, tuple[tuple[int, ...], dict[int, str]]] = field(default_factory=dict, init=False)
    # by number of rows and lengths
    _layouts: dict[tuple[Channel, int, tuple[int, ...]], MessageLayout] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        kind = ActionKind
        self._handlers = {
            kind.FORWARD: self._forward,
            kind.BACKWARD: self._backward,
            kind.BACKWARD_INPUT: self._backward_inputs,
            kind.BACKWARD_WEIGHT: self._backward_weights,
            kind.SEND_FORWARD: self._send,
            kind.SEND_GRADIENT: self._send,
            kind.RECEIVE_FORWARD: self._post_receive,
            kind.RECEIVE_GRADIENT: self._post_receive,
            kind.WAIT_FORWARD: self._wait_forward,
            kind.WAIT_GRADIENT: self._wait_gradient,
            kind.DONE_FORWARD: self._send_done,
            kind.DONE_GRADIENT: self._send_done,
            kind.ALLOW_REDUCTIONS: self._begin_last_micro_batch,
            kind.WAIT_REDUCTIONS: self._finish_reductions,
        }
        if self.host_link is not None:
            self._copies = StageParameters(
                link=self.host_link, tensors=self.tensors, names=self._parameters_of_stage
            )
        self._old_buffers = {
            slot.name
            for index, stage in self.stages.items()
            for slot in stage.inputs
            if self._made_elsewhere(index, slot.name)
        }
        for (source, _), edge in self.edges.items():
            if source in self.stages:
                for value in edge.forward:
                    self._num_readers[value.name] = self._num_readers.get(value.name, 0) + 1

    def run(
        self, program: Program, phases: Sequence[str], state: StepState, queued: Sequence[QueuedMessage] = ()
    ) -> None:
        """Run every action of ``program``; ``phases[i]`` says in words what action i does, for the monitor.

        ``queued``: when this rank's messages are queued, where the device runs behind the host.
        """
        prefix = f"step {state.number}, {self._label}, "
        transport = self.world.transport
        transport.begin_step(queued)
        self.send_buffers.begin()
        with torch.no_grad():
            self._note_old_values(state)
            if state.record is not None:
                self._run_measured(program, phases, state, prefix, state.record)
            else:
                self._start_copies(program)
                for place, (action, phase) in enumerate(zip(program, phases, strict=True)):
                    self.world.monitor.phase(prefix + phase)
                    transport.reach(place)
                    self._handlers[action.kind](action, state)
            transport.reach(len(program))
            if self._copies is not None:
                self._copies.end()

    def _start_copies(self, program: Program) -> None:
        if self._copies is not None:
            self._copies.begin(program)

    @property
    def _label(self) -> str:
        return lane_text(sorted(self.stages)) if self.stages else "no stage"

    def _run_measured(
        self, program: Program, phases: Sequence[str], state: StepState, prefix: str, record: StepRecord
    ) -> None:
        mark, marks = record.mark, record.marks_of(program)
        with record.following():
            marks.append(mark())
            if record.tracker is not None and self.host_link is not None and state.pending is not None:
                record.tracker.add([memory.flat for memory in state.pending.memory])
            self._start_copies(program)
            for place, (action, phase) in enumerate(zip(program, phases, strict=True)):
                self.world.monitor.phase(prefix + phase)
                self.world.transport.reach(place)
                self._handlers[action.kind](action, state)
                marks.append(mark())
                if record.tracker is not None and action.kind is ActionKind.FORWARD:
                    # Compiled kernels allocate what they return themselves.
                    saved = state.saved.get((action.stage, action.micro_batch), ())
                    record.tracker.add([*saved, *state.values.values()])

    def _forward(self, action: Action, state: StepState) -> None:
        index, m = action.stage, action.micro_batch
        stage = self.stages[index]
        if self._copies is not None:
            self._copies.forward_begins(index)
        args = [self._argument(index, slot, m, state) for slot in stage.inputs]
        if state.training:
            outputs, state.saved[index, m] = stage.forward(args, self._destinations("F", index, m, state))
        else:
            outputs = stage.infer(args, self._destinations("F", index, m, state))
        del args
        if self._copies is not None:
            self._copies.forward_done(index)
        for position, (slot, tensor) in enumerate(zip(stage.outputs, outputs, strict=True)):
            self._keep_output(position, slot, tensor, m, state)
        self.world.transport.after_compute()

    def _argument(self, stage: int, slot: StageSlot, micro_batch: int, state: StepState) -> torch.Tensor:
        match slot.kind:
            case "parameter" if slot.name not in self.updated_buffers:
                return self._parameter(stage, slot.name)
            case "parameter" | "buffer":
                return self._buffer(stage, slot.name, micro_batch, state)
            case "batch" | "boundary":
                return state.inbox.pop((stage, slot.name, micro_batch))
            case "replicated":
                return state.inputs[slot.name]
            case "first_row":
                start, _ = state.rows.interval(stage, self.world.rank, micro_batch)
                # Not torch.tensor: that copies from the host, and a copy waits for the device.
                return torch.full((), start, dtype=torch.int64, device=self.world.device)
            case _:
                return state.scalars[slot.name]

    def _parameters_of_stage(self, stage: int) -> list[str]:
        return [slot.name for slot in self.stages[stage].inputs if slot.kind == "parameter"]

    def _buffer(self, stage: int, name: str, micro_batch: int, state: StepState) -> torch.Tensor:
        is_parameter = name in self.parameter_names  # of which all micro-batches read one value
        key = (name, OLD_VALUE if is_parameter or self._made_elsewhere(stage, name) else micro_batch)
        if key in state.buffers_read:
            return state.buffers_read[key]
        tensor = self._parameter(stage, name) if is_parameter else self.tensors[name]
        # Saved values may alias the argument, and the update after the forward writes the buffer in place.
        tensor = tensor.clone() if name in self.updated_buffers else tensor
        if state.training:
            state.buffers_read[key] = tensor
        return tensor

    def _parameter(self, stage: int, name: str) -> torch.Tensor:
        return self.tensors[name] if self._copies is None else self._copies.of(stage, name)

    def _made_elsewhere(self, stage: int, name: str) -> bool:
        """Whether another stage of this rank makes the new values of a buffer: then this one must not see them."""
        return any(other != stage and name in made for other, made in self.made_buffers.items())

    def _note_old_values(self, state: StepState) -> None:
        for name in self._old_buffers:
            state.buffers_read.setdefault((name, OLD_VALUE), self.tensors[name].clone())

    def _keep_output(
        self, position: int, slot: Any, tensor: torch.Tensor, micro_batch: int, state: StepState
    ) -> None:
        match slot.kind:
            case "boundary" | "rows":
                if slot.name in self._num_readers:
                    state.values[slot.name, micro_batch] = tensor
                    state.readers[slot.name, micro_batch] = self._num_readers[slot.name]
            case "partial":
                exact = tensor.double() if tensor.is_floating_point() else tensor
                if tensor.is_complex():
                    exact = tensor.to(torch.complex128)
                state.partials[slot.name] = (
                    state.partials[slot.name] + exact if slot.name in state.partials else exact
                )
            case "buffer":
                if state.apply_buffer_updates and (
                    not slot.once or micro_batch == state.rows.num_micro_batches - 1
                ):
                    self.buffers[slot.fqn].copy_(tensor)
            case "replicated":
                state.replicated_outputs[slot.name] = tensor

    def _backward(self, action: Action, state: StepState) -> None:
        index, m = action.stage, action.micro_batch
        saved, grads = self._saved(index, m, state), self._output_gradients(index, m, state)
        results = self.stages[index].backward(
            saved, grads, self._sink(index, state), self._destinations("B", index, m, state)
        )
        del saved, grads
        self._end_backward(index, m, state, results)

    def _backward_inputs(self, action: Action, state: StepState) -> None:
        index, m = action.stage, action.micro_batch
        saved, grads = self._saved(index, m, state), self._output_gradients(index, m, state)
        results, state.kept[index, m] = self.stages[index].backward_inputs(
            saved, grads, self._destinations("B", index, m, state)
        )
        del saved, grads
        self._end_backward(index, m, state, results)

    def _backward_weights(self, action: Action, state: StepState) -> None:
        index = action.stage
        kept = state.kept.pop((index, action.micro_batch))
        self.stages[index].backward_weights(kept, self._sink(index, state))
        self.world.transport.after_compute()

    def _saved(self, stage: int, micro_batch: int, state: StepState) -> Any:
        # A list is emptied by the stage, so that each saved value is freed after its last use.
        key = (stage, micro_batch)
        return state.saved[key] if state.keep_saved else list(state.saved.pop(key))

    def _output_gradients(self, index: int, micro_batch: int, state: StepState) -> list[torch.Tensor | None]:
        stage = self.stages[index]
        return [
            state.output_gradient(stage.outputs[position], micro_batch) for position in stage.grad_outputs
        ]

    def _sink(self, stage: int, state: StepState) -> StageGradients:
        assert state.pending is not None, "backward without gradient buffers"
        return StageGradients(state.pending, self._gradient_names(stage), stage in state.stages_in_last)

    def _end_backward(
        self, index: int, micro_batch: int, state: StepState, gradients: Sequence[torch.Tensor]
    ) -> None:
        """Note what a backward, or its first part, has made."""
        stage = self.stages[index]
        if state.copies is not None:
            state.copies.add(BUCKETS, micro_batch, stage.gradient_copies)
        for position, gradient in zip(stage.grad_inputs, gradients, strict=True):
            state.input_gradients[index, stage.inputs[position].name, micro_batch] = gradient
        self.world.transport.after_compute()

    def _gradient_names(self, index: int) -> Mapping[int, str]:
        """Of the parameters of a stage, by their positions. One that is compiled for more later may come to have
        others.
        """
        stage = self.stages[index]
        positions = stage.grad_parameters
        known = self._names.get(index)
        if known is None or known[0] != positions:
            names = {position: self.parameter_names[stage.inputs[position].name] for position in positions}
            self._names[index] = known = (positions, names)
        return known[1]

    def _others_to_come(self) -> dict[str, int]:
        """Parameters of several stages of this rank: in how many more than one."""
        if len(self.stages) == 1:
            return {}
        readers = Counter(name for index in self.stages for name in self._gradient_names(index).values())
        return {name: count - 1 for name, count in readers.items() if count > 1}

    def _destinations(self, direction: str, index: int, micro_batch: int, state: StepState) -> Destinations:
        """Acquire the buffers of messages that hold several values, where the stage writes some of them
        itself.
        """
        stage = self.stages[index]
        if direction == "F":
            stored = {stage.outputs[position].name: position for position in stage.stored_outputs}
        else:
            stored = {stage.inputs[position].name: position for position in stage.stored_gradients}
        found: dict[int, torch.Tensor] = {}
        for (source, destination), edge in state.shapes.edges.items() if stored else ():
            own, other, values = (
                (source, destination, edge.forward)
                if direction == "F"
                else (destination, source, edge.gradient)
            )
            is_sent = own == index and other >= 0 and other not in self.stages
            if is_sent and any(value.name in stored for value in values):
                pieces = state.rows.pieces(own, other, self.world.rank, micro_batch)
                start, stop = state.rows.interval(own, self.world.rank, micro_batch)
                # Rows that go to several ranks are packed for each.
                if [(piece.start, piece.stop) for piece in pieces] == [(start, stop)]:
                    channel = Channel(own, other, direction)
                    found |= self.send_buffers.destinations(
                        channel, micro_batch, pieces[0].peer, values, stop - start, stored
                    )
        return found

    def _values(self, channel: Channel, state: StepState) -> tuple[Value, ...]:
        if channel.direction == "F":
            return state.shapes.edges[channel.source, channel.destination].forward
        return state.shapes.edges[channel.destination, channel.source].gradient

    def _send(self, action: Action, state: StepState) -> None:
        channel, m = action.channel, action.micro_batch
        values = self._values(channel, state)
        pieces = state.rows.pieces(action.stage, action.peer, self.world.rank, m)
        tensors, start = self._outgoing(action, values, state)
        for piece in pieces:
            rows = slice_rows(tensors, values, start, piece)
            if piece.peer == self.world.rank:
                state.local_messages[channel, m].append((piece, rows))
            else:
                message = self._message(action, piece, tensors, rows, state)
                work = self.world.transport.isend(message, piece.peer, str(channel))
                state.sends[channel, m].append(work)

    def _layout(self, channel: Channel, piece: Piece, state: StepState) -> MessageLayout:
        """How the rows of a piece lie in their message: worked out once for each number of rows and length."""
        key = (channel, piece.stop - piece.start, state.shapes.lengths)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            values = self._values(channel, state)
            layout = layout_of(values, key[1], wires_of(channel, values, self.boundary_wire))
            self._layouts[key] = layout
        return layout

    def _message(
        self,
        action: Action,
        piece: Piece,
        tensors: Sequence[torch.Tensor],
        rows: RowsTensors,
        state: StepState,
    ) -> torch.Tensor:
        layout = self._layout(action.channel, piece, state)
        if action.stage < 0 or action.peer < 0:
            return make_message(
                rows, layout
            )  # of the user's tensors, or for the user; memory is not kept for these
        packed = self.send_buffers.pack(action.channel, action.micro_batch, piece.peer, rows, layout)
        if state.copies is None:
            return packed.message
        state.copies.add(MESSAGES, action.micro_batch, packed.report)
        for tensor, row in zip(tensors, rows, strict=True):
            if storage_key(tensor) != storage_key(row):  # its samples do not lie one after the other
                state.copies.add(
                    MESSAGES, action.micro_batch, CopyReport(bytes_copied=row.nbytes, launches=1)
                )
        return packed.message

    def _outgoing(
        self, action: Action, values: Sequence[Value], state: StepState
    ) -> tuple[list[torch.Tensor], int]:
        """The tensors to send and the global row at which they begin."""
        m = action.micro_batch
        if action.stage in (INPUT, OUTPUT):
            source = state.inputs if action.stage == INPUT else state.grad_outputs
            start, _ = state.rows.owned_rows(action.stage, self.world.rank)
            return [source[value.name] for value in values], start
        start, _ = state.rows.interval(action.stage, self.world.rank, m)
        if action.kind is ActionKind.SEND_GRADIENT:
            return [state.input_gradients.pop((action.stage, value.name, m)) for value in values], start
        tensors = []
        for value in values:
            key = (value.name, m)
            tensors.append(state.values[key])
            state.readers[key] -= 1
            if state.readers[key] == 0:
                del state.values[key], state.readers[key]
        return tensors, start

    def _send_done(self, action: Action, state: StepState) -> None:
        for work in state.sends.pop((action.channel, action.micro_batch), ()):
            work.wait(self.limit_seconds)
        self.send_buffers.done(action.channel, action.micro_batch)

    def _post_receive(self, action: Action, state: StepState) -> None:
        channel, m = action.channel, action.micro_batch
        values = self._values(channel, state)
        for piece in state.rows.pieces(action.stage, action.peer, self.world.rank, m):
            if piece.peer != self.world.rank:
                incoming = make_incoming(
                    self._layout(channel, piece, state), piece, self.world.transport.acquire_message
                )
                if self.examples is not None:
                    incoming.fill(values, self.examples)
                work = self.world.transport.irecv(incoming.buffer, piece.peer, str(channel))
                state.receives[channel, m].append((incoming, work))

    def _rows_of(self, incoming: Incoming, micro_batch: int, state: StepState) -> RowsTensors:
        if incoming.layout.is_exact:
            return incoming.views
        unpacked = incoming.unpacked(self.send_buffers.tables)
        if state.copies is not None:
            state.copies.add(MESSAGES, micro_batch, unpacked.report)
        return unpacked.tensors

    def _arrived(self, action: Action, state: StepState) -> list[torch.Tensor] | None:
        """The values of this rank's rows once all pieces are there; None when it has no rows in this
        micro-batch.
        """
        channel, m = action.channel, action.micro_batch
        arrived = state.local_messages.pop((channel, m), [])
        for incoming, work in state.receives.pop((channel, m), ()):
            work.wait(self.limit_seconds)
            arrived.append((incoming.piece, self._rows_of(incoming, m, state)))
        start, stop = state.rows.interval(action.stage, self.world.rank, m)
        if start == stop:
            return None
        values = self._values(channel, state)
        return assemble(values, arrived, start, stop, overlapping=action.peer == OUTPUT)

    def _wait_forward(self, action: Action, state: StepState) -> None:
        tensors = self._arrived(action, state)
        if tensors is None:
            return
        for value, tensor in zip(self._values(action.channel, state), tensors, strict=True):
            if action.stage == OUTPUT:
                state.row_outputs[value.name, action.micro_batch] = tensor
            else:
                state.inbox[action.stage, value.name, action.micro_batch] = tensor

    def _wait_gradient(self, action: Action, state: StepState) -> None:
        tensors = self._arrived(action, state)
        if tensors is None:
            return
        m = action.micro_batch
        kind = "rows" if action.peer == OUTPUT else "boundary"
        for value, tensor in zip(self._values(action.channel, state), tensors, strict=True):
            if action.stage == INPUT:
                _accumulate(state.user_gradients, (value.name, m), tensor)
            else:
                _accumulate(state.output_gradients, (kind, value.name, m), tensor)

    def _begin_last_micro_batch(self, action: Action, state: StepState) -> None:
        assert state.pending is not None, "reductions without gradient buckets"
        if not state.stages_in_last:
            state.pending.begin_last_micro_batch(self._others_to_come())
        state.stages_in_last.add(action.stage)

    def _finish_reductions(self, action: Action, state: StepState) -> None:
        assert state.pending is not None, "reductions without gradient buckets"
        state.pending.finish()


def _accumulate(target: dict[_Key, torch.Tensor], key: _Key, tensor: torch.Tensor) -> None:
    target[key] = target[key] + tensor if key in target else tensor
