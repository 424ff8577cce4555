"""A tiny executor of schedule programs, written apart from the package, that serves tests as the judge of
programs.

In: programs, edges, a random generator. Out: nothing, or BadProgram. Values are hashes of what they were
computed from, so a message that ends in the wrong place changes every result after it. Transport is as strict
as allowed: nothing moves before both ends have posted, the i-th send of a channel meets the i-th receive
whatever they are called, and delays are random.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping

from rannc_backend.ir.action import Action
from rannc_backend.schedule.edges import EdgeSpec


class BadProgram(Exception):
    """The programs hang, leak or compute something else."""


class _Message:
    """One end of a transfer that was posted."""

    def __init__(self, payload=None):
        self.payload = payload
        self.arrived = False


class Executor:
    """Runs one call. `lanes`: the stages of each; lane s runs stage s if not given."""

    def __init__(
        self,
        programs: Mapping[int, tuple[Action, ...]],
        edges: list[EdgeSpec],
        num_micro_batches: int,
        phase: str,
        lanes: tuple[tuple[int, ...], ...] | None = None,
    ):
        self.programs = programs
        self.stages_of = lanes or tuple((lane,) for lane in range(len(programs)))
        self.num_stages = sum(map(len, self.stages_of))
        self.num_micro_batches = num_micro_batches
        self.phase = phase
        everyone = list(range(len(programs)))
        lane_of = {stage: [lane] for lane, stages in enumerate(self.stages_of) for stage in stages}
        self.owners = {**lane_of, -1: everyone, -2: everyone}
        # (stage, letter) -> where values come from; letter F: forward values, B: gradients
        self.sources = defaultdict(list)
        self.targets = defaultdict(list)
        for edge in edges:
            if edge.num_forward_values and phase != "backward":
                self.sources[edge.dst, "F"].append(edge.src)
                self.targets[edge.src, "F"].append(edge.dst)
            if edge.num_gradient_values and (phase == "backward" or phase == "train" and edge.dst != -2):
                self.sources[edge.src, "B"].append(edge.dst)
                self.targets[edge.dst, "B"].append(edge.src)
        self.reference = self._reference()
        self.queues = defaultdict(
            lambda: ([], [])
        )  # (source, destination, letter, from lane, to lane) -> sends, receives
        self.num_matched = defaultdict(int)
        self.in_transit = []
        self.num_done = defaultdict(int)  # (letter, stage) -> computes
        self.finished = set()

    def _reference(self) -> dict:
        """(letter, stage or endpoint, micro-batch) -> value, without any program."""
        values = {}
        stages = range(self.num_stages)
        for m in range(self.num_micro_batches):
            for lane in self.programs:
                values["F", -1, m, lane] = hash(("row", lane, m))
                values["B", -2, m, lane] = hash(("grad_output", lane, m))
            for letter, sequence in (("F", stages), ("B", reversed(stages))):
                for stage in sequence:
                    values[letter, stage, m, self.owners[stage][0]] = self._value(
                        letter,
                        stage,
                        m,
                        {s: self._all(values, letter, s, m) for s in self.sources[stage, letter]},
                    )
        return values

    def _all(self, values: dict, letter: str, place: int, m: int) -> tuple:
        return tuple(values[letter, place, m, lane] for lane in self.owners[place])

    def _value(self, letter: str, stage: int, m: int, arrived: dict) -> int:
        return hash((letter, stage, m, tuple(sorted(arrived.items()))))

    def run(self, generator: random.Random) -> None:
        """Run to the end; BadProgram if that is not reached in the right state."""
        processes = {lane: self._lane(lane) for lane in self.programs}
        while len(self.finished) < len(processes):
            if self.in_transit and generator.random() < 0.3:
                self._arrive(generator.randrange(len(self.in_transit)))
                continue
            lanes = [lane for lane in processes if lane not in self.finished]
            generator.shuffle(lanes)
            if not any([next(processes[lane]) for lane in lanes[: generator.randint(1, len(lanes))]]):
                if self.in_transit:
                    self._arrive(generator.randrange(len(self.in_transit)))
                elif not any([next(processes[lane]) for lane in lanes]):
                    raise BadProgram("deadlock")
        for key, (sends, receives) in self.queues.items():
            if len(sends) != len(receives):
                raise BadProgram(f"{key}: {len(sends)} sends and {len(receives)} receives")

    def _arrive(self, index: int) -> None:
        # Any channel may be next, but a channel delivers in order.
        key, send, receive = next(item for item in self.in_transit if item[0] == self.in_transit[index][0])
        self.in_transit.remove((key, send, receive))
        receive.payload = send.payload
        send.arrived = receive.arrived = True

    def _match(self, key: tuple) -> None:
        sends, receives = self.queues[key]
        while self.num_matched[key] < min(len(sends), len(receives)):
            position = self.num_matched[key]
            self.in_transit.append((key, sends[position], receives[position]))
            self.num_matched[key] += 1

    def _lane(self, lane: int) -> Iterator[bool]:
        """Yields whether it got on since the last time."""
        sent, posted, ready, results = {}, {}, {}, {}
        kept = set()  # between the two parts of a backward
        armed_after, waited_after = {}, {}  # by stage
        everything = {(stage, m) for stage in self.stages_of[lane] for m in range(self.num_micro_batches)}
        saved = set(everything) if self.phase == "backward" else set()
        for action in self.programs[lane]:
            kind, m, stage, peer = action.kind.value, action.micro_batch, action.stage, action.peer
            if stage >= 0 and stage not in self.stages_of[lane]:
                raise BadProgram(f"lane {lane} does {action}")
            if kind == "W":
                if (stage, m) not in kept:
                    raise BadProgram(f"{action} without its I")
                kept.remove((stage, m))
                self.num_done["B", stage] += 1
            elif kind in "FBI":
                letter = "F" if kind == "F" else "B"
                arrived = {}
                for source in self.sources[stage, letter]:
                    if (source, stage, letter, m) not in ready:
                        raise BadProgram(f"{action} uses what has not arrived from {source}")
                    arrived[source] = ready.pop((source, stage, letter, m))
                if (letter, stage, m) in results:
                    raise BadProgram(f"{action} twice")
                if kind == "F" and self.phase in ("train", "forward"):
                    saved.add((stage, m))
                if letter == "B":
                    if (stage, m) not in saved:
                        raise BadProgram(f"{action} has no saved values")
                    saved.remove((stage, m))
                results[letter, stage, m] = self._value(letter, stage, m, arrived)
                if kind == "I":
                    kept.add((stage, m))
                else:
                    self.num_done[kind, stage] += 1
            elif kind[0] == "S":
                if stage >= 0 and (kind[1], stage, m) not in results:
                    raise BadProgram(f"{action} before it is made")
                value = self.reference.get((kind[1], stage, m, lane))
                if stage >= 0:
                    value = results[kind[1], stage, m]
                self._check_fresh(sent, (stage, peer, kind[1], m), action)
                sent[stage, peer, kind[1], m] = messages = []
                for other in self.owners[peer]:
                    message = _Message(value)
                    messages.append(message)
                    self.queues[stage, peer, kind[1], lane, other][0].append(message)
                    self._match((stage, peer, kind[1], lane, other))
            elif kind[0] == "R":
                self._check_fresh(posted, (peer, stage, kind[1], m), action)
                posted[peer, stage, kind[1], m] = messages = []
                for other in self.owners[peer]:
                    message = _Message()
                    messages.append(message)
                    self.queues[peer, stage, kind[1], other, lane][1].append(message)
                    self._match((peer, stage, kind[1], other, lane))
            elif kind[0] in "WD":
                table = posted if kind[0] == "W" else sent
                key = (peer, stage, kind[1], m) if kind[0] == "W" else (stage, peer, kind[1], m)
                if key not in table:
                    raise BadProgram(f"{action} waits for nothing")
                messages = table.pop(key)
                moved = True
                while not all(message.arrived for message in messages):
                    yield moved
                    moved = False
                if kind[0] == "W":
                    ready[key] = tuple(message.payload for message in messages)
            elif kind == "A":
                self._reduce(action, armed_after)
            elif kind == "G":
                self._reduce(action, waited_after)
                moved = True
                # The reductions of all stages may be tied to each other.
                others = range(self.num_stages)
                while any(self.num_done["B", other] < self.num_micro_batches for other in others):
                    yield moved
                    moved = False
            yield True
        if kept:
            raise BadProgram(f"lane {lane} never computes W of {kept}")
        self._check_end(lane, sent, posted, ready, results, saved, armed_after, waited_after)
        self.finished.add(lane)
        yield True

    def _check_fresh(self, table: dict, key: tuple, action: Action) -> None:
        if key in table:
            raise BadProgram(f"{action} overwrites a buffer in use")

    def _reduce(self, action: Action, done: dict[int, int]) -> None:
        if action.stage in done:
            raise BadProgram(f"{action} twice")
        done[action.stage] = self.num_done["B", action.stage]

    def _check_end(self, lane, sent, posted, ready, results, saved, armed_after, waited_after) -> None:
        everything = range(self.num_micro_batches)
        if sent or posted:
            raise BadProgram(f"lane {lane} leaks {[*sent, *posted]}")
        letters = {"train": "FB", "forward": "F", "backward": "B", "infer": "F"}[self.phase]
        own = self.stages_of[lane]
        expected = {
            (letter, stage, m): self.reference[letter, stage, m, lane]
            for letter in letters
            for stage in own
            for m in everything
        }
        if results != expected:
            raise BadProgram(f"lane {lane} computed other values")
        owned = {
            (source, place, letter, m): self._all(self.reference, letter, source, m)
            for place, letter in ((-2, "F"), (-1, "B"))
            for source in self.sources[place, letter]
            for m in everything
        }
        if ready != owned:
            raise BadProgram(f"the caller on lane {lane} got other values")
        if saved != ({(stage, m) for stage in own for m in everything} if self.phase == "forward" else set()):
            raise BadProgram(f"lane {lane} keeps saved values {saved}")
        if "B" in letters:
            number = self.num_micro_batches
            if armed_after != dict.fromkeys(own, number - 1) or waited_after != dict.fromkeys(own, number):
                raise BadProgram(f"lane {lane} reduces unfinished gradients")
        elif armed_after or waited_after:
            raise BadProgram(f"lane {lane} reduces without a backward")


def run_program(programs, edges, num_micro_batches, phase, seed: int, lanes=None) -> None:
    """One run with the delays of `seed`."""
    Executor(programs, list(edges), num_micro_batches, phase, lanes).run(random.Random(seed))
