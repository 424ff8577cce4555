"""One step of a rank's program, and programs as text.

In: nothing but integers. Out: `Action`, a frozen value that prints as `2SF0>3` and parses back, and whole
programs as text, one line per lane.

Terms. A *stage* is a number from 0; INPUT ("I") and OUTPUT ("O") are *endpoints*: the role that every rank
has as the owner of its local input rows and of its output rows. A *micro-batch* is a number from 0. A *lane*
is a group of ranks that run the same program (in the first version lane s is the ranks of stage s), a
*program* is the tuple of actions of one lane. A *channel* is the queue of messages of one direction (forward
values or gradients) from one stage or endpoint to another; its messages are matched in the order in which
they are sent and received.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

INPUT = -1
OUTPUT = -2
NO_PEER = -3
NO_MICRO_BATCH = -1

FORWARD_VALUES = "F"
GRADIENTS = "B"


class GraphUse(StrEnum):
    """What a graph is compiled for: a step that differentiates scalars alone, one that differentiates all outputs, one
    without a backward.
    """

    LOSS = "loss"
    ALL = "all"
    INFER = "infer"

    @property
    def is_trained(self) -> bool:
        """Whether such a step has a backward."""
        return self is not GraphUse.INFER

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases (`schedule.edges.Phase`) of such a step, each with a program of its own."""
        return _PHASES[self]


_PHASES = {GraphUse.LOSS: ("train",), GraphUse.ALL: ("forward", "backward"), GraphUse.INFER: ("infer",)}


class ActionKind(str, Enum):
    """What an action does; the value is its spelling. Members compare by spelling, so actions can be
    sorted.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"  # the first part of a backward: gradients of the stage's inputs
    BACKWARD_WEIGHT = "W"  # the second part: gradients of its parameters
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    WAIT_FORWARD = "WF"
    DONE_FORWARD = "DF"
    SEND_GRADIENT = "SB"
    RECEIVE_GRADIENT = "RB"
    WAIT_GRADIENT = "WB"
    DONE_GRADIENT = "DB"
    ALLOW_REDUCTIONS = "A"
    WAIT_REDUCTIONS = "G"

    def __str__(self) -> str:
        return self.value


COMPUTE_KINDS = frozenset(
    {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT}
)
SEND_KINDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_GRADIENT})
RECEIVE_KINDS = frozenset({ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_GRADIENT})
WAIT_KINDS = frozenset({ActionKind.WAIT_FORWARD, ActionKind.WAIT_GRADIENT})
DONE_KINDS = frozenset({ActionKind.DONE_FORWARD, ActionKind.DONE_GRADIENT})
MESSAGE_KINDS = SEND_KINDS | RECEIVE_KINDS | WAIT_KINDS | DONE_KINDS
# Sends and dones name the destination after ">", receives and waits the source after "<".
OUTGOING_KINDS = SEND_KINDS | DONE_KINDS
REDUCTION_KINDS = frozenset({ActionKind.ALLOW_REDUCTIONS, ActionKind.WAIT_REDUCTIONS})

_COUNTERPART_KINDS = {
    ActionKind.SEND_FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.RECEIVE_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.WAIT_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.DONE_FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.SEND_GRADIENT: ActionKind.RECEIVE_GRADIENT,
    ActionKind.RECEIVE_GRADIENT: ActionKind.SEND_GRADIENT,
    ActionKind.WAIT_GRADIENT: ActionKind.SEND_GRADIENT,
    ActionKind.DONE_GRADIENT: ActionKind.RECEIVE_GRADIENT,
}
_DIRECTIONS = {kind: kind.value[1] for kind in MESSAGE_KINDS}
_ENDPOINT_LETTERS = {INPUT: "I", OUTPUT: "O"}
_ENDPOINTS_BY_LETTER = {letter: endpoint for endpoint, letter in _ENDPOINT_LETTERS.items()}
_ACTION_PATTERN = re.compile(
    r"(\d+|[IO])(SF|RF|WF|DF|SB|RB|WB|DB|[FBIWAG])(\d+)?(?:([<>])(\d+|[IO]))?", re.ASCII
)
_LANE_PATTERN = re.compile(r"lane (\d+):(.*)", re.ASCII)


class Channel(NamedTuple):
    """One directed queue of messages. `direction` is FORWARD_VALUES or GRADIENTS."""

    source: int
    destination: int
    direction: str

    def __str__(self) -> str:
        return _channel_text(self)


@functools.lru_cache(maxsize=4096)  # asked for with every message
def _channel_text(channel: Channel) -> str:
    return f"{place_text(channel.source)}>{place_text(channel.destination)} {channel.direction}"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One step: `kind` done by `stage` (a stage number, INPUT or OUTPUT) for `micro_batch`, with `peer` for
    messages.
    """

    stage: int
    kind: ActionKind
    micro_batch: int = NO_MICRO_BATCH
    peer: int = NO_PEER

    def __post_init__(self) -> None:
        if not isinstance(self.kind, ActionKind):
            raise ValueError(f"kind {self.kind!r} is not an ActionKind")
        is_message = self.kind in MESSAGE_KINDS
        if self.stage < 0 and not (is_message and self.stage in _ENDPOINT_LETTERS):
            raise ValueError(
                f"stage {self.stage} cannot do {self.kind}: stages count from 0, endpoints only move messages"
            )
        if is_message != (self.peer != NO_PEER):
            raise ValueError(
                f"{self.kind} {'needs' if is_message else 'takes'} {'a' if is_message else 'no'} peer"
            )
        if is_message and (self.peer < OUTPUT or (self.peer < 0 and self.stage < 0)):
            raise ValueError(f"peer {self.peer} of {self.kind} is neither a stage nor an endpoint of a stage")
        if (self.kind in REDUCTION_KINDS) != (
            self.micro_batch == NO_MICRO_BATCH
        ) or self.micro_batch < NO_MICRO_BATCH:
            raise ValueError(f"micro-batch {self.micro_batch} does not fit {self.kind}")

    def __str__(self) -> str:
        if self.kind in REDUCTION_KINDS:
            return f"{self.stage}{self.kind.value}"
        text = f"{place_text(self.stage)}{self.kind.value}{self.micro_batch}"
        if self.peer == NO_PEER:
            return text
        return f"{text}{'>' if self.kind in OUTGOING_KINDS else '<'}{place_text(self.peer)}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`; ValueError when no action does."""
        match = _ACTION_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action; actions look like 2F0, 2SF0>3, 3RF0<2, ISF0>2 or 2A"
            )
        stage, kind, micro_batch, arrow, peer = match.groups()
        action = cls(
            stage=_parse_place(stage),
            kind=ActionKind(kind),
            micro_batch=NO_MICRO_BATCH if micro_batch is None else int(micro_batch),
            peer=NO_PEER if peer is None else _parse_place(peer),
        )
        if str(action) != text:
            raise ValueError(f"{text!r} is not how {action} is spelled")
        return action

    @property
    def is_compute(self) -> bool:
        """True for F, B, I and W."""
        return self.kind in COMPUTE_KINDS

    @property
    def is_message(self) -> bool:
        """True for what moves, or waits for, a message."""
        return self.kind in MESSAGE_KINDS

    @property
    def is_send(self) -> bool:
        """True where a message is posted."""
        return self.kind in SEND_KINDS

    @property
    def is_receive(self) -> bool:
        """True where room for a message is posted."""
        return self.kind in RECEIVE_KINDS

    @property
    def is_wait(self) -> bool:
        """True where a message is waited for."""
        return self.kind in WAIT_KINDS

    @property
    def is_done(self) -> bool:
        """True where the end of a send is waited for."""
        return self.kind in DONE_KINDS

    @property
    def channel(self) -> Channel:
        """The channel of a message action; ValueError for the others."""
        return _channel_of(self.kind, self.stage, self.peer)

    @property
    def counterpart(self) -> Action:
        """What the other end does: a send and its receive name each other, a wait names the send that it
        waits for, a done names the receive that it waits for. ValueError for actions that move no message."""
        if self.kind not in _COUNTERPART_KINDS:
            raise ValueError(f"{self} moves no message")
        return Action(self.peer, _COUNTERPART_KINDS[self.kind], self.micro_batch, self.stage)


@functools.lru_cache(maxsize=4096)
def _channel_of(kind: ActionKind, stage: int, peer: int) -> Channel:
    direction = _DIRECTIONS.get(kind)
    if direction is None:
        raise ValueError(f"{kind} of stage {stage} moves no message")
    return Channel(stage, peer, direction) if kind in OUTGOING_KINDS else Channel(peer, stage, direction)


Program = tuple[Action, ...]


class OrderedMessage(NamedTuple):
    """When devices are given a message, from the ranks of one lane to those of another or of the same (an
    endpoint is all lanes).

    Places: the number of the action before which the operation is queued, or the length of the program; see
    `schedule/message_order.py`.
    """

    channel: Channel
    micro_batch: int
    sender: int
    receiver: int
    sender_place: int
    receiver_place: int


def place_text(place: int) -> str:
    """A stage as its number, an endpoint as its letter."""
    return _ENDPOINT_LETTERS.get(place) or str(place)


def format_programs(programs: Mapping[int, Program], *, width: int = 110) -> str:
    """`lane 0: 0RF0<I 0WF0<I 0F0 ...`, lanes in order, wrapped at `width` with indented continuation
    lines.
    """
    lines: list[str] = []
    for lane in sorted(programs):
        text = " ".join([f"lane {lane}:", *map(str, programs[lane])])
        # Hyphens cannot occur in actions, long words neither: breaking is at spaces only.
        lines.extend(
            textwrap.wrap(
                text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
            )
        )
    return "".join(f"{line}\n" for line in lines)


def parse_programs(text: str) -> dict[int, Program]:
    """The programs that print as `text`. Empty lines and lines that begin with "#" are skipped; ValueError
    names a bad line.
    """
    programs: dict[int, list[Action]] = {}
    lane: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split()
        match = _LANE_PATTERN.fullmatch(line)
        if match is not None:
            lane, words = int(match[1]), match[2].split()
            if lane in programs:
                raise ValueError(f"line {number}: lane {lane} is there twice")
            programs[lane] = []
        elif lane is None or not line[0].isspace():
            raise ValueError(f"line {number}: {line!r} starts no lane; a lane starts with 'lane <number>:'")
        try:
            programs[lane].extend(_parse_all(words))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return {lane: tuple(actions) for lane, actions in programs.items()}


def describe(program: Program) -> tuple[str, ...]:
    """What each action does, in words: "micro-batch 3, forward (2F3)"."""
    words = {
        "F": "forward",
        "B": "backward",
        "I": "backward to its inputs",
        "W": "backward to its parameters",
        "A": "gradient reduction",
        "G": "waiting for gradient reductions",
    }
    verbs = {"S": "sending", "R": "receiving", "W": "waiting for", "D": "finishing the send of"}
    texts = []
    for action in program:
        spelling = action.kind.value
        if len(spelling) == 1:
            what = words.get(spelling, spelling)
        else:
            what = f"{verbs[spelling[0]]} {'values' if spelling[1] == 'F' else 'gradients'}"
        where = f"micro-batch {action.micro_batch}, " if action.micro_batch >= 0 else ""
        texts.append(f"{where}{what} ({action})")
    return tuple(texts)


def _parse_all(words: Iterable[str]) -> list[Action]:
    return [Action.parse(word) for word in words]


def _parse_place(text: str) -> int:
    return _ENDPOINTS_BY_LETTER[text] if text in _ENDPOINTS_BY_LETTER else int(text)
