"""What is computed again where the user says it: modules by name, or all but the tensors that the model marks; and the
modules at which stages may start.

In: the option recompute_modules, or `MARKED`, and an analysed graph. Out: `Recomputed` (passes/stage/recompute.py): a
segment for the nodes of each call of a module that is named; or the option stage_pivots with dotted names.

A name is the end of a module's dotted path, the name of a class, or `ROOT`. Of modules inside of each other the outermost
counts. A module that does not run itself, as a list of layers does not, stands for those in it that do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import fx

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import NoMarkedTensorError, StagePinError, UnknownModuleError
from rannc_backend.passes.stage.recompute import KEPT, NOTHING_RECOMPUTED, Recomputed
from rannc_backend.settings.choices import MARKED, names_in
from rannc_backend.settings.options import Config

ROOT = "ROOT"
OPTION = "recompute_modules"


def told_recompute(told: str, analysis: GraphAnalysis) -> Recomputed:
    """What `told` (see `MemoryOptions.told_recompute`) says of a graph; nothing where a graph has none of it."""
    nodes = [node for node in analysis.split.rowwise.graph.nodes if node.op == "call_function"]
    if not told:
        return NOTHING_RECOMPUTED
    names = names_in(told)
    everything = {node.name: 0 for node in nodes}
    if told == MARKED:
        marks = frozenset(node.name for node in nodes if node.meta.get(KEPT))
        return Recomputed(segment_of=everything, kept=marks, part_of=_marks_before(nodes))
    if ROOT in names:
        return Recomputed(segment_of=everything)
    calls = _Calls(nodes, _classes(analysis))
    numbers: dict[tuple[str, str], int] = {}
    found: dict[str, int] = {}
    for node in nodes:
        call = calls.outermost(node, names)
        if call is not None:
            found[node.name] = numbers.setdefault(call, len(numbers))
    return Recomputed(segment_of=found)


def check_told(told: str, analysis: GraphAnalysis) -> None:
    """Raise UnknownModuleError for a name that no module of the graph has, NoMarkedTensorError where marks are asked for
    and there is none.
    """
    nodes = [node for node in analysis.split.rowwise.graph.nodes if node.op == "call_function"]
    if told == MARKED and not any(node.meta.get(KEPT) for node in nodes):
        raise NoMarkedTensorError()
    if not told or told == MARKED:
        return
    calls = _Calls(nodes, _classes(analysis))
    for name in names_in(told):
        if name != ROOT and not any(calls.outermost(node, (name,)) is not None for node in nodes):
            raise UnknownModuleError(
                name,
                valid=calls.names(),
                option=OPTION,
                kinds="Names are ends of those that model.named_modules() gives, names of classes, or ROOT.",
            )


def with_pivots(config: Config, analysis: GraphAnalysis) -> Config:
    """The options with the dotted names of the modules that stage_pivots means.

    Raises UnknownModuleError for a name that no module of the graph has, StagePinError for that of the whole model.
    """
    if not config.stage_pivots:
        return config
    nodes = [node for node in analysis.split.rowwise.graph.nodes if node.op == "call_function"]
    calls, found = _Calls(nodes, _classes(analysis)), dict[str, None]()
    for name in names_in(config.stage_pivots):
        paths = {call[0]: None for node in nodes if (call := calls.outermost(node, (name,))) is not None}
        if not paths:
            kinds = "Names are ends of those that model.named_modules() gives, or names of classes."
            raise UnknownModuleError(name, valid=calls.names() - {ROOT}, option="stage_pivots", kinds=kinds)
        if "" in paths:
            raise StagePinError(
                f"stage_pivots names {name!r}, which is the whole model: only the first stage starts there",
                cure="name modules of the model.",
            )
        found |= paths
    return config.model_copy(update={"stage_pivots": ",".join(found)})


def _marks_before(nodes: Iterable[fx.Node]) -> dict[str, int]:
    """By node, the most marked values on a path to it."""
    found: dict[str, int] = {}
    for node in nodes:
        before = [
            found[source.name] + bool(source.meta.get(KEPT))
            for source in node.all_input_nodes
            if source.name in found
        ]
        found[node.name] = max(before, default=0)
    return found


def _classes(analysis: GraphAnalysis) -> dict[str, str]:
    return {path: type(module).__name__ for path, module in analysis.captured.root_module.named_modules()}


class _Calls:
    """The calls of modules that nodes were made in. `class_of`: by dotted path."""

    def __init__(self, nodes: Collection[fx.Node], class_of: Mapping[str, str]) -> None:
        self._class_of = class_of
        self._running = {path for node in nodes for path, _ in _stack(node)}

    def outermost(self, node: fx.Node, names: Collection[str]) -> tuple[str, str] | None:
        """The outermost call around a node of a module that has one of the names: its path, and which call."""
        for path, call in _stack(node):
            if any(self._is_named(each, names) for each in self._standing_for(path)):
                return path, call
        return None

    def names(self) -> set[str]:
        """All names that there are."""
        paths = {each for path in self._running for each in self._standing_for(path)} - {""}
        ends = {path.rpartition(".")[2] for path in paths}
        return paths | ends | {self._class_of[path] for path in paths if path in self._class_of} | {ROOT}

    def _standing_for(self, path: str) -> Iterator[str]:
        """The path, and those of modules around it that do not run themselves."""
        yield path
        while "." in path:
            path = path.rpartition(".")[0]
            if path not in self._running:
                yield path

    def _is_named(self, path: str, names: Collection[str]) -> bool:
        return any(
            name == self._class_of.get(path) or (path and f".{path}".endswith(f".{name}")) for name in names
        )


def _stack(node: fx.Node) -> tuple[tuple[str, str], ...]:
    found: tuple[tuple[str, str], ...] = node.meta.get("module_stack", ())
    return found
