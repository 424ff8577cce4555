"""What the user asks of the stages by module name: modules that start a stage, that stay together, that are
on a given stage.

In: `StagePins` from the options, and the module of each atom. Out: groups of atoms to contract, an order that
the pins allow, cuts that must be made, and the `StageConstraints` of the blocks. An atom *belongs* to a
module if its own module is that one or inside of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rannc_backend.errors import StagePinError, UnknownModuleError
from rannc_backend.ir.block_graph import StageConstraints
from rannc_backend.planner.blocks.atom_graph import AtomGraph
from rannc_backend.settings.choices import names_in
from rannc_backend.settings.options import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePins:
    """Dotted module names: `starts` must start a stage, `pivots` are where stages but the first may start, anywhere if
    there are none, each of `together` is in one stage, `stages` names (module, stage index).
    """

    starts: tuple[str, ...] = ()
    pivots: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    stages: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_config(cls, config: Config) -> StagePins:
        """From the options stage_starts, stage_pivots (see `with_pivots`), keep_together and stage_pins."""
        return cls(
            starts=names_in(config.stage_starts),
            pivots=names_in(config.stage_pivots),
            together=names_in(config.keep_together),
            stages=tuple(
                (name, int(stage))
                for name, stage in (part.rsplit("=", 1) for part in names_in(config.stage_pins))
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPins:
    """`StagePins` with the atoms that belong to each module."""

    pins: StagePins
    atoms: Mapping[str, tuple[int, ...]]

    def groups(self) -> list[tuple[int, ...]]:
        return [self.atoms[name] for name in self.pins.together]

    def stage_floors(self, items: AtomGraph) -> list[int]:
        """For each item the highest stage that something it depends on, or itself, is pinned to; 0 for the
        rest.

        Raises StagePinError when an item is pinned to two stages, or to an earlier one than what it reads.
        """
        pinned = self._pinned(items)
        floor: list[tuple[int, str]] = [(0, "")] * items.num_atoms
        sources: list[list[int]] = [[] for _ in floor]
        for value in items.values:
            for reader in value.readers:
                sources[reader].append(value.producer)
        for item in range(items.num_atoms):
            floor[item] = max((floor[source] for source in sources[item]), default=(0, ""))
            stage, name = pinned.get(item, floor[item])
            if stage < floor[item][0]:
                raise StagePinError(
                    f"{name!r} is pinned to stage {stage}, but it reads values of {floor[item][1]!r}, pinned "
                    f"to stage {floor[item][0]}",
                    cure="pin what is computed first to the earlier stage.",
                )
            if stage >= floor[item][0]:
                floor[item] = (stage, name)
        return [stage for stage, _ in floor]

    def cuts(self, line: AtomGraph) -> list[int]:
        """Places in the line that must be cut: before modules that start a stage or may, before and after those with
        a stage.
        """
        places = [self._start(name, line) for name in self.pins.starts]
        places += self._pivots(line)
        for name, _ in self.pins.stages:
            found = self._places(name, line)
            places += [found[0], found[-1] + 1]
        return sorted(set(places))

    def constraints(self, line: AtomGraph, bounds: Sequence[int]) -> StageConstraints:
        """The pins as blocks. Raises StagePinError when no stages can be as they say, naming the modules."""
        block_of = [
            block for block, pair in enumerate(zip(bounds, bounds[1:], strict=False)) for _ in range(*pair)
        ]
        starts = {block_of[self._start(name, line)]: name for name in reversed(self.pins.starts)}
        starts.pop(0, None)
        pivots = {0, *(block_of[place] for place in self._pivots(line))} if self.pins.pivots else set()
        for block, name in starts.items():
            if pivots and block not in pivots:
                raise StagePinError(
                    f"stage_starts asks for a stage at {name!r}, and stage_pivots does not allow one there",
                    cure="name it in stage_pivots too, or take it out of stage_starts.",
                )
        stage_of: dict[int, tuple[int, str]] = {}
        for name, stage in self.pins.stages:
            stage_of |= {block_of[place]: (stage, name) for place in self._places(name, line)}
        _check(starts, stage_of, num_blocks=len(bounds) - 1)
        return StageConstraints(
            starts=tuple(sorted(starts)),
            stage_of=tuple((block, stage) for block, (stage, _) in sorted(stage_of.items())),
            legal_starts=tuple(sorted(pivots)),
        )

    def _pivots(self, line: AtomGraph) -> list[int]:
        """Places of the pivots at which a stage can start; StagePinError where there are pivots, and it can at none."""
        places, refused = [], None
        for name in self.pins.pivots:
            try:
                places.append(self._start(name, line, option="stage_pivots"))
            except StagePinError as error:
                refused = error
        if refused is not None and not places:
            raise refused
        return places

    def _pinned(self, items: AtomGraph) -> dict[int, tuple[int, str]]:
        pinned: dict[int, tuple[int, str]] = {}
        for name, stage in self.pins.stages:
            for item in self._places(name, items):
                other_stage, other = pinned.setdefault(item, (stage, name))
                if other_stage != stage:
                    raise StagePinError(
                        f"{other!r} is pinned to stage {other_stage} and {name!r} to stage {stage}, "
                        f"but some of their operators must stay together{self._why(items, item)}",
                        cure="pin them to one stage.",
                    )
        return pinned

    def _why(self, items: AtomGraph, item: int) -> str:
        kept = [name for name in self.pins.together if set(self.atoms[name]) <= set(items.members[item])]
        return f" (keep_together: {', '.join(kept)})" if kept else ""

    def _places(self, name: str, items: AtomGraph) -> list[int]:
        wanted = set(self.atoms[name])
        return [item for item, members in enumerate(items.members) if not wanted.isdisjoint(members)]

    def _start(self, name: str, line: AtomGraph, option: str = "stage_starts") -> int:
        place = self._places(name, line)[0]
        if not set(line.members[place]) <= set(self.atoms[name]):
            kept = [
                other
                for other in self.pins.together
                if not set(self.atoms[other]).isdisjoint(line.members[place])
            ]
            reason = (
                f"keep_together has {kept[0]!r}"
                if kept
                else "a value that is not one per row would be cut off from its readers"
            )
            raise StagePinError(
                f"{name!r} cannot start a stage: its first operator must stay with earlier ones, as {reason}",
                cure=f"take it out of {option}" + (" or keep_together." if kept else "."),
            )
        return place


def find_pins(pins: StagePins, modules: Sequence[str]) -> FoundPins:
    """Look up the modules. `modules`: of each atom. Raises UnknownModuleError."""
    inside: dict[str, list[int]] = {}
    for atom, path in enumerate(modules):
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:depth]), []).append(atom)
    inside.pop("", None)
    asked = [("stage_starts", name) for name in pins.starts] + [
        ("stage_pivots", name) for name in pins.pivots
    ]
    asked += [("keep_together", name) for name in pins.together]
    asked += [("stage_pins", name) for name, _ in pins.stages]
    for option, name in asked:
        if name not in inside:
            raise UnknownModuleError(name, valid=inside, option=option)
    return FoundPins(pins=pins, atoms={name: tuple(inside[name]) for _, name in asked})


def _check(starts: Mapping[int, str], stage_of: Mapping[int, tuple[int, str]], *, num_blocks: int) -> None:
    """Whether stages can be numbered so: between pinned blocks as many stages as starts at least, and as
    blocks at most.
    """
    before_block, before_stage, before = 0, 0, ""
    for block, (stage, name) in sorted(stage_of.items()):
        between = [starts[start] for start in sorted(starts) if before_block < start <= block]
        whom = (
            f"{before!r} to stage {before_stage} and {name!r} to stage {stage}"
            if before
            else f"{name!r} to stage {stage}"
        )
        if len(between) > stage - before_stage:
            raise StagePinError(
                f"stage_pins gives {whom}, but stage_starts begins {len(between)} stage(s) on the way there, "
                "at " + ", ".join(map(repr, between)),
                cure="give the later module a higher stage, or take names out of stage_starts.",
            )
        if block - before_block < stage - before_stage:
            raise StagePinError(
                f"stage_pins gives {whom}, but the graph has only {block - before_block} block(s) for the "
                "stages before the latter",
                cure="give it a lower stage, or raise max_partition_num.",
            )
        before_block, before_stage, before = block, stage, name
    assert all(block < num_blocks for block in stage_of), "a pinned block is not in the graph"
