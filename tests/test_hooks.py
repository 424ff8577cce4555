"""Imports do nothing, and whatever this package puts in a place of torch, Python or the process is in one
table: `rannc_backend.settings.hooks.HOOKS`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rannc_backend.settings import hooks

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path for part in ("kernels", "passes", "rannc_backend") for path in (ROOT / part).rglob("*.py")
)
HOOKS_FILE = "rannc_backend/settings/hooks.py"
ENTRY_POINT = "rannc_backend.backend"
SECONDS = 240

# What looks like a patch and is none, by file. One more is a decision.
ALLOWED = {
    "passes/batch/row_wise.py": {"setattr(overload, _MARK, True)", "setattr(operator, _MARK, True)"},
    "passes/canonicalize.py": {"delattr(graph_module, str(node.target))"},
    "passes/graph_copy.py": {"setattr(module, name, value)"},
    "passes/kept_functions.py": {
        "setattr(operator, _MARK, code)",
        "setattr(backward_operator, _BACKWARD_MARK, code)",
    },
    "passes/tracing.py": {"setattr(owner, name, value)"},
    # Marks on tensors, contexts and functions that belong to one model or one compilation.
    "rannc_backend/capture/dynamo.py": {
        "delattr(tensor, name)",
        "setattr(tensor, name, attributes[name])",
    },
    "rannc_backend/capture/first_trace.py": {"setattr(context, _ATTRIBUTE, reason)"},
    "rannc_backend/capture/module_compile.py": {"setattr(compiled, _MARK, True)"},
    # One step of Dynamo's own counting, which an error of ours would leave out.
    "rannc_backend/capture/refusals.py": {
        "setattr(callback_handler, name, getattr(callback_handler, name) - 1)"
    },
    "rannc_backend/runtime/absent_tensors.py": {
        "delattr(tensor, _ATTRIBUTE)",
        "tensor.__class__ = _absent_class(type(tensor))",
        "tensor.__class__ = absence.original",
        "setattr(tensor, _ATTRIBUTE, absence)",
        "setattr(twin, _ATTRIBUTE, replace(absence_of(tensor), original=torch.Tensor, is_value=True))",
        "setattr(twin, _ATTRIBUTE, absence)",
        "twin.__class__ = absence.original",
    },
    "rannc_backend/pyrannc/rannc_module.py": {
        "delattr(self.__dict__['_wrapped'], name)",
        "setattr(self.__dict__['_wrapped'], name, value)",
    },
    # Of our own logger.
    "rannc_backend/log/logger.py": {"logger.addFilter(once)"},
    # Given to `hooks.register`.
    "rannc_backend/capture/written_out.py": {"_OPERATOR.py_impl(_KEY)"},
    # A note at an error under way.
    "rannc_backend/capture/nonstrict/reads.py": {"setattr(error, _OF_A_CHECK, True)"},
    # The environment of another process.
    "rannc_backend/cli/verify.py": {"environ['CUDA_VISIBLE_DEVICES'] = ''"},
    # Before anything of the package can be imported there.
    "rannc_backend/runtime/job/helper.py": {"sys.modules[name] = module"},
    # The script of the user sees its own name and folder; while a hook writes, what it writes is kept.
    "rannc_backend/verify/job.py": {
        "sys.argv = [settings.script, *settings.arguments]",
        "sys.path[0] = os.path.dirname(os.path.abspath(settings.script))",
    },
    "rannc_backend/runtime/job/last_words.py": {
        "before, sys.stderr = (sys.stderr, io.StringIO())",
        "sys.stderr = before",
    },
}

# Of optimizers, modules, scalers and tensors: whatever has them is no object of ours.
_METHODS = {"state_dict", "load_state_dict", "zero_grad", "unscale_", "__class__", "__call__"}
_CHANGES_MAPPING = {"setdefault", "update", "pop", "clear", "popitem"}
_REGISTERS = re.compile(
    r"register_\w*(hook|callback)\w*|register_at_fork|addHandler|addFilter|setLoggerClass|captureWarnings"
    r"|filterwarnings|simplefilter|putenv|unsetenv|set_wakeup_fd|setattr|delattr|py_impl"
)
_REGISTERS_OF = {
    "atexit.register",
    "signal.signal",
    "faulthandler.register",
    "sys.settrace",
    "sys.setprofile",
}
_REGISTERS_ALIKE = {name.rpartition(".")[2] for name in _REGISTERS_OF}


def patches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Statements that set something outside of the package, or have something called by it; with their
    line.
    """
    outside = _names_from_outside(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            last = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if last not in _CHANGES_MAPPING | _REGISTERS_ALIKE and not _REGISTERS.fullmatch(last):
                continue
            name = ast.unparse(node.func)
            of_self = bool(node.args) and ast.unparse(node.args[0]) in ("self", "self.switches")
            on_environ = name.rpartition(".")[0] in ("environ", "os.environ") and last in _CHANGES_MAPPING
            if on_environ or name in _REGISTERS_OF or (_REGISTERS.fullmatch(last) and not of_self):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            leaves = [leaf for target in targets for leaf in getattr(target, "elts", [target])]
            if any(_is_outside(leaf, outside) for leaf in leaves):
                yield node.lineno, ast.unparse(node)


def _names_from_outside(tree: ast.Module) -> set[str]:
    """Names of what is imported from elsewhere, and of parts of it."""
    names = {"environ"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("rannc_backend"):
            names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            if _root(node.value) in names:
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_outside(target: ast.expr, outside: set[str]) -> bool:
    if isinstance(target, ast.Attribute) and target.attr in _METHODS:
        return True
    return isinstance(target, (ast.Attribute, ast.Subscript)) and _root(target) in outside


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_patches_are_in_one_file() -> None:
    found = [
        f"{_name(path)}:{line}: {text}"
        for path in SOURCES
        if _name(path) != HOOKS_FILE
        for line, text in patches(_tree(path))
        if text not in ALLOWED.get(_name(path), ())
    ]
    assert not found, "give it an entry in rannc_backend/settings/hooks.py:\n" + "\n".join(found)


def test_what_is_allowed_is_there() -> None:
    unused = [
        f"{file}: {text}"
        for file, texts in ALLOWED.items()
        for text in texts - {found for _, found in patches(_tree(ROOT / file))}
    ]
    assert not unused, "\n".join(unused)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import sys\nsys.excepthook = f", True),
        ("import sys\nbefore, sys.exit = sys.exit, f", True),
        ("import torch\ncls = torch.optim.Optimizer\ncls.step = f", True),
        ("from torch.amp import GradScaler\nGradScaler.unscale_ = f", True),
        ("setattr(holder, 'step', f)", True),
        ("import atexit\natexit.register(f)", True),
        ("import signal\nsignal.signal(2, f)", True),
        ("import os\nos.environ['X'] = '1'", True),
        ("def f(environ):\n    environ.setdefault('X', '1')", True),
        ("optimizer.state_dict = f", True),
        ("register_optimizer_step_post_hook(f)", True),
        ("handler.register_end_callback(f)", True),
        ("import warnings\nwarnings.simplefilter('ignore')", True),
        ("logging.getLogger('x').addHandler(h)", True),
        ("import sys\ndel sys.modules['x']", True),
        ("def f(self):\n    self.x = 1\n    setattr(self, 'y', 2)", False),
        ("import sys\nname = sys.modules['x']", False),
        ("from rannc_backend.settings import hooks\nhooks.replace('x', sys, 'exit', f)", False),
    ],
)
def test_the_check_sees_patches(source: str, found: bool) -> None:
    assert bool(list(patches(ast.parse(source)))) is found


def test_every_entry_is_used_where_it_says() -> None:
    used: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in ast.walk(_tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "hooks"
                and node.func.attr not in ("install", "together", "in_force", "Undo")
            ):
                assert isinstance(node.args[0], ast.Constant), f"{_name(path)}:{node.lineno}: no plain name"
                module = ".".join(path.relative_to(ROOT / "rannc_backend").with_suffix("").parts)
                used.setdefault(node.args[0].value, set()).add(module)
    assert used == {hook.name: set(hook.by.split(", ")) for hook in hooks.HOOKS}


def table() -> str:
    """`HOOKS` as docs/architecture.md has it."""
    rows = [
        f"| {hook.what} | `{'`, `'.join(hook.by.split(', '))}` | {hook.when} | {hook.until} | {hook.why} |"
        for hook in hooks.HOOKS
    ]
    return "\n".join(["| What | By | When | Undone | Why |", "|---|---|---|---|---|", *rows]) + "\n"


def test_the_table_is_in_the_documents() -> None:
    assert table() in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


# A snapshot of what could be patched; run in processes of their own.
_LOOK = """
import atexit, gc, importlib, json, logging, os, signal, sys, threading, warnings
import psutil

def look():
    import torch
    from torch._dynamo import callback, config, eval_frame, utils
    from torch.nn.modules import module
    from torch.optim import optimizer
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    inside = lambda function: [id(cell.cell_contents) for cell in function.__closure__ or ()]
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    lists = (callback.callback_handler.start_callbacks, callback.callback_handler.end_callbacks)
    return {
        "processes": len(psutil.Process().children()),
        "threads": threading.active_count(),
        "GradScaler": members(torch.amp.GradScaler),
        "Optimizer": members(torch.optim.Optimizer),
        "Module": members(torch.nn.Module),
        "norms": [
            [id(function), inside(function)]
            for function in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.get_total_norm)
        ],
        "compiled calls": id(eval_frame._TorchDynamoContext.__call__),
        "Dynamo callbacks": [[type(each).__name__, len(each)] for each in lists],
        "recompilations": len(utils.get_hook_for_recompile_user_context() or ()),
        "ignored loggers": type(
            getattr(config, "ignore_logging_functions", None) or config.ignore_logger_methods
        ).__name__,
        "kernels": len(torch.ops.aten.cross_entropy_loss.default.py_kernels),
        "module hooks": {
            name: len(value)
            for name, value in vars(module).items()
            if name.startswith("_global_") and hasattr(value, "__len__")
        },
        "optimizer hooks": [
            len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
        ],
        "sys": [id(sys.excepthook), id(sys.unraisablehook), id(threading.excepthook)],
        "ends": [id(sys.exit), id(os._exit), type(SystemExit.__dict__["code"]).__name__],
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()] + [descriptor],
        "atexit": atexit._ncallbacks(),
        "environ": dict(os.environ),
        "warnings": [str(each) for each in warnings.filters],
        "logging": {each.name: [len(each.handlers), len(each.filters), each.level] for each in loggers
                    if each.handlers or each.filters or each.level},
        "gc": gc.get_threshold(),
        "threads of torch": torch.get_num_threads(),
    }

def members(cls):
    return {name: id(value) for name, value in vars(cls).items()}

def changed(before, after):
    return sorted(name for name in before if json.dumps(before[name]) != json.dumps(after[name]))
"""

_IMPORT_ALL = """
modules, entry_point = json.loads(sys.stdin.read())
libraries = json.load(open(sys.argv[1])) if os.path.exists(sys.argv[1]) else None
for name in libraries or ():
    try:
        importlib.import_module(name)
    except Exception:
        pass
if libraries is None:
    # What else there is to import: it does what it does.
    for name in modules:
        importlib.import_module(name)
    found = [name for name in sys.modules if not name.startswith(("rannc_backend", "__"))]
    json.dump(found, open(sys.argv[1], "w"))
    sys.exit()
before = look()
for name in modules:
    importlib.import_module(name)
    found = changed(before, look())
    assert not found, (name, found)
    assert entry_point not in sys.modules, name
from rannc_backend.settings import hooks
assert not hooks.in_force(), hooks.in_force()
importlib.import_module(entry_point)
print(json.dumps([sorted(hooks.in_force()), changed(before, look())]))
"""

_ONE_OF_TWO = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


def _modules() -> list[str]:
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in SOURCES]
    full = [part if part[0] == "rannc_backend" else ("rannc_backend", *part) for part in parts]
    names = [".".join(part[:-1] if part[-1] == "__init__" else part) for part in full]
    return [name for name in names if name != ENTRY_POINT]


def _import_all(libraries: Path, environ: dict[str, str]) -> str:
    result = subprocess.run(
        [sys.executable, "-c", _LOOK + _IMPORT_ALL, str(libraries)],
        input=json.dumps([_modules(), ENTRY_POINT]),
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.timeout(3 * SECONDS)
def test_imports_do_nothing_and_that_of_the_backend_installs_the_table(tmp_path: Path) -> None:
    import torch

    from rannc_backend.settings.torch_version import is_older

    libraries = tmp_path / "libraries.json"
    _import_all(libraries, {})
    old = {hooks.AT_IMPORT_OLD_TORCH} if is_older(torch.__version__, (2, 13)) else set()
    of_torch = ["Dynamo callbacks", "compiled calls", "ignored loggers", "logging", "module hooks"]
    expected = {
        "one process": (set(), of_torch),
        "one of two": ({hooks.AT_IMPORT_OF_RANK}, [*of_torch, "atexit", "ends", "processes", "sys"]),
    }
    for environ, (also, changes) in zip(({}, _ONE_OF_TWO), expected.values(), strict=True):
        installed, changed = json.loads(_import_all(libraries, environ).splitlines()[-1])
        times = {hooks.AT_IMPORT, *old, *also}
        assert installed == sorted(hook.name for hook in hooks.HOOKS if hook.when in times)
        assert changed == sorted([*changes, *(["kernels"] if old else [])])


class _Place:
    word = "before"


def test_a_hook_is_undone_once() -> None:
    undo = hooks.replace("zero_grad", _Place, "word", "ours")
    assert _Place.word == "ours" and "zero_grad" in hooks.in_force()
    undo()
    assert _Place.word == "before"
    _Place.word = "later"
    undo.remove()
    assert _Place.word == "later"
    _Place.word = "before"


def test_what_somebody_has_put_over_ours_stays() -> None:
    undo = hooks.replace("zero_grad", _Place, "word", "ours")
    _Place.word = "theirs"
    undo()
    assert _Place.word == "theirs"
    _Place.word = "before"


@pytest.mark.parametrize("before", [{}, {"X": "0"}])
def test_an_item_is_put_back(before: dict[str, str]) -> None:
    mapping = dict(before)
    undo = hooks.replace_item("threads", mapping, "X", "1")
    assert mapping == {"X": "1"}
    undo()
    assert mapping == before


def test_handles_of_every_kind_are_undone() -> None:
    ended: list[str] = []

    class Handle:
        def remove(self) -> None:
            ended.append("handle")

    for register in (lambda f: Handle(), lambda f: lambda: ended.append("function"), lambda f: None):
        hooks.register("wrappers", register, len)()
    assert ended == ["handle", "function"]


def test_a_hook_needs_an_entry() -> None:
    with pytest.raises(KeyError):
        hooks.replace_item("no such entry", {}, "X", "1")
