"""Where a plan cuts the tree of the user's modules.

In: the module paths of each block ("encoder.layer.3.attention"), the stage of each block. Out: the tree with
the stages of every module, and short names of what a stage computes: `encoder.layer.0-11, 12 (part)`.

Terms. Whole: all that is computed under a module is in one stage. Layer: a module whose name is a number;
neighbouring whole layers are drawn together. Paths are text of a plan and may be anything; deep ones are cut
at `_MAX_DEPTH` parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rannc_backend.ir.plan import Plan
from rannc_backend.report.words import printable

ROOT_NAME = "(model)"
_MAX_DEPTH = 24
_MAX_LAYER_DIGITS = 6


@dataclass(slots=True, eq=False)
class ModuleNode:
    """A module. `stages`: of everything computed in it or below; `own_stages`: of what it computes outside of
    its children.
    """

    name: str
    path: str
    stages: set[int] = field(default_factory=set)
    own_stages: set[int] = field(default_factory=set)
    children: dict[str, ModuleNode] = field(default_factory=dict)

    @property
    def layer(self) -> int | None:
        """The number of a layer; None for other names."""
        return (
            int(self.name)
            if self.name.isascii() and self.name.isdigit() and len(self.name) <= _MAX_LAYER_DIGITS
            else None
        )

    @property
    def has_layers(self) -> bool:
        """Whether there is a layer somewhere below."""
        return any(child.layer is not None or child.has_layers for child in self.children.values())

    def shape(self) -> tuple:
        """Equal for modules that look alike from below."""
        return tuple((name, child.shape()) for name, child in self.children.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRun:
    """One module, or neighbouring whole layers that look alike: `name` is "attention" or "0-11", `node` the
    first of them.
    """

    name: str
    node: ModuleNode
    num_modules: int = 1

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self.node.stages))


def module_tree(plan: Plan) -> ModuleNode:
    """The modules that the plan's blocks name, children in the order of their first use. What no module
    computes is the root's.
    """
    stage_of = {block: stage.index for stage in plan.stages for block in stage.blocks}
    return path_tree(
        (path, stage_of[block.index]) for block in plan.blocks for path in block.modules or ("",)
    )


def path_tree(places: Iterable[tuple[str, int]]) -> ModuleNode:
    """The tree of module paths, each with the number of a stage (or of whatever the paths are to be told
    apart by).
    """
    root = ModuleNode(name=ROOT_NAME, path="")
    for path, stage in places:
        node = root
        node.stages.add(stage)
        for part in _parts(path):
            if part not in node.children:
                node.children[part] = ModuleNode(name=part, path=f"{node.path}.{part}" if node.path else part)
            node = node.children[part]
            node.stages.add(stage)
        node.own_stages.add(stage)
    return root


def _parts(path: str) -> list[str]:
    parts = printable(path).split(".", _MAX_DEPTH - 1) if path else []
    return [part or "?" for part in parts]


def children_in_runs(node: ModuleNode) -> list[ModuleRun]:
    """The children of a module, neighbouring layers drawn together where they are whole, in one stage, and
    look alike.
    """
    runs: list[list[ModuleNode]] = []
    for child in node.children.values():
        before = runs[-1][-1] if runs else None
        if before is not None and _continues(before, child):
            runs[-1].append(child)
        else:
            runs.append([child])
    return [
        ModuleRun(
            name=run[0].name if len(run) == 1 else f"{run[0].name}-{run[-1].name}",
            node=run[0],
            num_modules=len(run),
        )
        for run in runs
    ]


def _continues(before: ModuleNode, after: ModuleNode) -> bool:
    if before.layer is None or after.layer is None:
        return False
    alike = len(before.stages) == 1 and before.stages == after.stages and before.shape() == after.shape()
    return after.layer == before.layer + 1 and alike


def stage_modules(root: ModuleNode, stage: int) -> list[str]:
    """What a stage computes, in short names in the order of first use; a module that another stage shares is
    marked "(part)".
    """
    if root.stages == {stage}:
        return ["the whole model"]
    entries = list(_entries(root, stage))
    names: list[str] = []
    begin = 0
    while begin < len(entries):
        node, whole = entries[begin]
        end = begin + 1
        while whole and end < len(entries) and _follows(entries[end - 1], entries[end]):
            end += 1
        last = entries[end - 1][0]
        # The list of layers is named once.
        same_list = begin > 0 and node.layer is not None and _list_of(entries[begin - 1][0]) == _list_of(node)
        name = node.name if same_list else node.path
        name = name if end - begin == 1 else f"{name}-{last.name}"
        names.append(name if whole else f"{name} (part)")
        begin = end
    if not names and stage in root.own_stages:
        names.append("what no module computes")
    return names


def _follows(before: tuple[ModuleNode, bool], after: tuple[ModuleNode, bool]) -> bool:
    """Whether two entries are whole layers of one list, the second right after the first."""
    (first, first_whole), (second, second_whole) = before, after
    if not (first_whole and second_whole) or first.layer is None or second.layer is None:
        return False
    return _list_of(first) == _list_of(second) and second.layer == first.layer + 1


def _list_of(node: ModuleNode) -> str | None:
    """Path of the list that a layer is in; None for other modules."""
    return None if node.layer is None else node.path.rpartition(".")[0]


def _entries(node: ModuleNode, stage: int) -> Iterator[tuple[ModuleNode, bool]]:
    """Largest modules below `node` that are wholly in `stage`, and layers and leaves that are partly so
    (False).
    """
    for child in node.children.values():
        if stage not in child.stages:
            continue
        if child.stages == {stage}:
            yield child, True
        elif not child.children or (child.layer is not None and not child.has_layers):
            yield child, False
        elif any(stage in grandchild.stages for grandchild in child.children.values()):
            yield from _entries(child, stage)
        else:
            yield child, False
