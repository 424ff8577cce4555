"""All errors of this package as a page: what each class is about, every text with which it is raised, and
what to change.

In: the classes, and the source of the package. Out: Markdown, docs/troubleshooting.md. Texts are read from
the source and not collected by hand, so that none is missing or out of date; what is put into a text when it
is raised is shown as three dots.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rannc_backend.errors import models
from rannc_backend.errors.base import RanncError, UserInputError

DOTS = "…"
_SAID_WITH_IT = "said with the error"
# By module of rannc_backend.errors, in the order of a job: what a person sees.
SYMPTOMS: Mapping[str, str] = {
    "options": "An option, a file of options or a name in it is refused",
    "ranks": "Ranks do not start, do not find each other, wait for each other, or end",
    "models": "The model, or a batch, is refused, or a value is not there",
    "planning": "No plan is found, or a plan or a cluster is refused",
    "training": "The optimizer or gradients are refused",
    "checkpoints": "A checkpoint is not saved or not loaded",
}
_HEAD = """# Troubleshooting

<!-- Written by `rannc errors --markdown` from the error classes and the places that raise them; do not edit. -->

Every error says its cause, its place and what to change, in this order, and the first lines of a failed job are those of the rank that
caused it:

```
[rannc] the job has ended because of rank 0 of 2 (host vm, pid 26327)
[rannc]   cause   DataDependentControlFlowError: the model is not one graph, Dynamo breaks it: control flow depends on the data: ...
[rannc]   at      train.py:12, in forward
[rannc]   cure    write it with torch.where (or torch.cond), or decide it outside of the compiled model.
[rannc]   in      capture
[rannc]   rank 1  failed in the same way
```

Search this page for the name after `cause`, or for words of the text. What launchers print below that, forty lines with torchrun, says no
more: `torchrun --tee 3 --log-dir logs` keeps each rank's own output in a file, and Open MPI's `mpirun --quiet` says less. With
`RANNC_LOG_LEVEL=debug` the tracebacks of refusals are whole.

| what you see | what to do first |
|---|---|
| nothing works yet | [`rannc doctor`](doctor.md): versions, MPI, GPUs, shared memory, ports, two ranks that train |
| the job does not start, or each rank trains by itself | `rannc doctor`; [Launch](../README.md#launch) |
| several hosts, and it hangs at the start | `rannc doctor --launch "srun -N 2 -n 2"`: which host cannot reach which; [Slurm](slurm.md) |
| out of memory | more stages or micro-batches: [planning](planning.md) |
| it is slow | [performance](performance.md), [tracing](tracing.md) |
| you want help | `rannc doctor --report report.txt`, read it, and send it with the first lines of the failure |

In the tables, three dots stand for names and numbers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What an error says, and what to change; dots for what is known only when it is raised."""

    problem: str
    cure: str


def errors_markdown() -> str:
    """The text of docs/troubleshooting.md."""
    texts = texts_by_class()
    lines = [_HEAD]
    for module, symptom in SYMPTOMS.items():
        lines.append(f"## {symptom}\n")
        for cls in classes_of(module):
            lines += _section(cls, texts.get(cls.__name__, []))
    lines += ["## Anything else\n"]
    others: list[type[RanncError]] = [RanncError, *classes_of("base")]
    for cls in others:
        if texts.get(cls.__name__):
            lines += _section(cls, texts[cls.__name__])
    return "\n".join(lines).rstrip() + "\n"


def classes_of(module: str) -> list[type[RanncError]]:
    """The error classes of a module of rannc_backend.errors, by name."""
    waiting, found = [RanncError], set[type[RanncError]]()
    while waiting:
        for cls in waiting.pop().__subclasses__():
            waiting.append(cls)
            found.add(cls)
    return sorted(
        (cls for cls in found if cls.__module__ == f"rannc_backend.errors.{module}"),
        key=lambda cls: cls.__name__,
    )


def texts_by_class() -> dict[str, list[Text]]:
    """Every text with which each class is raised somewhere in the package, in alphabetical order."""
    own_texts = {
        name
        for module in (*SYMPTOMS, "base")
        for name in (cls.__name__ for cls in classes_of(module) if _has_text(cls))
    }
    found: dict[str, set[Text]] = {}
    trees = {_module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in _sources()}
    constants = {module: _constants_of(tree) for module, tree in trees.items()}
    tree = ast.parse(inspect.getsource(models))
    made_by = _made_by(_WrittenOut(_constants_of(tree)).visit(tree))
    for module, tree in trees.items():
        written = _WrittenOut({**_imported(tree, constants), **constants[module]}).visit(tree)
        for name, text in _texts_in(written, own_texts, made_by):
            found.setdefault(name, set()).add(text)
    for cls in (cls for module in SYMPTOMS for cls in classes_of(module)):
        parent = cls.__bases__[0].__name__
        if cls.__name__ in own_texts and parent in own_texts:  # the text goes into that of the class above
            (above,) = found[parent]
            texts = {
                Text(problem=above.problem.replace(DOTS, text.problem, 1), cure=text.cure)
                for text in found[cls.__name__]
            }
            found[cls.__name__] = texts
    return {name: sorted(texts, key=lambda text: (text.problem, text.cure)) for name, texts in found.items()}


def section_of(cls: type[RanncError]) -> str:
    """What the page says of one class."""
    return "\n".join(_section(cls, texts_by_class().get(cls.__name__, []))).rstrip()


def _section(cls: type[RanncError], texts: list[Text]) -> list[str]:
    about = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    own = (
        ""
        if cls.default_cure in (RanncError.default_cure, UserInputError.default_cure)
        else f" In general: {cls.default_cure}"
    )
    lines = [f"### {cls.__name__}\n", f"{about}{own}\n"]
    if texts:
        lines += ["| message | what to change |", "|---|---|"]
        lines += [f"| {_cell(text.problem)} | {_cell(text.cure or cls.default_cure)} |" for text in texts]
        lines.append("")
    return lines


def _cell(text: str) -> str:
    return re.sub(
        rf"{DOTS}(?:{DOTS})+", DOTS, " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
    )


def _sources() -> Iterator[Path]:
    package = Path(__file__).resolve().parents[1]
    # Installed, these two lie inside of the package.
    beside = [package.parent / name for name in ("passes", "kernels") if not (package / name).is_dir()]
    for folder in (package, *beside):
        yield from sorted(folder.rglob("*.py"))


def _constants_of(tree: ast.Module) -> dict[str, str]:
    """The strings to which a module gives names."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def _imported(tree: ast.Module, constants: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The strings of other modules, by the names that a module imports; `constants` by module."""
    return {
        each.asname or each.name: constants[str(node.module)][each.name]
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.name in constants.get(str(node.module), {})
    }


class _WrittenOut(ast.NodeTransformer):
    """Puts strings in the place of the names that a module has for them, so that the page shows the whole text."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = isinstance(node.ctx, ast.Load) and node.id in self._texts
        return ast.Constant(self._texts[node.id]) if known else node


def _module_of(path: Path) -> str:
    parts = path.with_suffix("").relative_to(Path(__file__).resolve().parents[2]).parts
    return ".".join(parts if parts[0] == "rannc_backend" else ("rannc_backend", *parts))


def _has_text(cls: type[RanncError]) -> bool:
    """Whether the class itself puts its text together."""
    return "problem" not in inspect.signature(cls.__init__).parameters


def _made_by(tree: ast.AST) -> dict[str, tuple[str, str]]:
    """The functions of a module that make an error of a text, by name, with its class and their cure."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name):
            if node.args.args and node.args.args[0].arg == "problem":
                cure = dict(
                    zip((each.arg for each in node.args.kwonlyargs), node.args.kw_defaults, strict=True)
                )
                found[node.name] = (node.returns.id, _shown(cure.get("cure") or ast.Constant("")))
    return found


def _texts_in(
    tree: ast.AST, own_texts: set[str], made_by: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, Text]]:
    """The texts with which a module raises, by class; `made_by` are the functions that make an error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in own_texts:
            for call in (each for each in ast.walk(node) if isinstance(each, ast.Call) and _is_super(each)):
                yield from ((node.name, text) for text in _text_of(call))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name, cure = made_by.get(node.func.id, (node.func.id, ""))
            if name.endswith("Error") and name not in own_texts:
                yield from ((name, text) for text in _text_of(node, cure))


def _is_super(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "__init__"
        and ast.unparse(call.func.value) == "super()"
    )


def _text_of(call: ast.Call, otherwise: str = "") -> Iterator[Text]:
    """What a call is given as problem and cure; `otherwise` is the cure of a call without one."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    problem = named.get("problem", call.args[0] if call.args else None)
    text = "" if problem is None else _shown(problem)
    if text.strip(f"{DOTS}: "):
        cure = _shown(named["cure"]) if "cure" in named else otherwise
        yield Text(problem=text, cure=cure if cure.strip(f"{DOTS}. ") or not cure else _SAID_WITH_IT)


def _shown(node: ast.AST) -> str:
    """The text of an expression, with dots for what is not written there."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_shown(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _shown(node.left) + _shown(node.right)
    if isinstance(node, ast.BoolOp):  # cure or "..."
        return _shown(node.values[-1])
    if isinstance(node, ast.IfExp):
        return _shown(node.orelse)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.IfExp | ast.Constant):
        return _shown(node.value)
    return DOTS
