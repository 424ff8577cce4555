"""Faults in reading and writing other libraries' files; see `chosen`."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_HUGGING_FACE = "integrations/hugging_face.py"
_DCP = "integrations/distributed_checkpoint.py"
_READER = "integrations/dcp_reader.py"
_FILES = "checkpoint/safetensors_directory.py"
_ONE = unit("integrations/hugging_face")
_TWO = unit("integrations/distributed_checkpoint")
_RANKS = ("tests/distributed/test_ecosystem_checkpoints.py::test_distributed_checkpoint[2-2]",)

CHOSEN_ECOSYSTEM: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "every-rank-writes-for-transformers",
            "runtime/state_hooks.py",
            'world.rank == 0 and bound.arguments.get("is_main_process", True)',
            "True",
            unit("runtime/state_hooks"),
        ),
        ("old-shards-stay", _HUGGING_FACE, "        disk.remove(directory / name)\n", "        pass\n", _ONE),
        ("another-form-in-silence", _HUGGING_FACE, "if key is None and (", "if False and (", _ONE),
        ("buffers-of-memory-as-it-was", _HUGGING_FACE, "for fill in (0, 1)]", "for fill in (0, 0)]", _ONE),
        ("sizes-of-1024", _HUGGING_FACE, '1024 if match["binary"] else 1000', "1024", _ONE),
        (
            "either-of-two-tied-values",
            _FILES,
            "if not torch.equal(self.mapped(there[0]), self.mapped(name)):",
            "if False:",
            _ONE,
        ),
        ("files-outside", _FILES, "if name != os.path.basename(name) or", "if", _ONE),
        ("an-index-that-lies", _FILES, "            self._require_all()\n", "", _ONE),
        (
            "elements-of-early-pythons-are-refused",
            _READER,
            'if (module, name) == ("builtins", "getattr"):',
            'if (module, name) == ("builtins", "setattr"):',
            _TWO,
        ),
        (
            "any-class-in-metadata",
            _READER,
            "        _refuse(module, name)\n",
            "        return super().find_class(module, name)\n",
            _TWO,
        ),
        (
            "values-that-run-code",
            _READER,
            'map_location="cpu", weights_only=True)\n',
            'map_location="cpu", weights_only=False)\n',
            _TWO,
        ),
        (
            "parts-that-are-missing",
            _READER,
            "if whole is None or num_elements != whole.numel():",
            "if whole is None:",
            _TWO,
        ),
        (
            "parts-at-the-beginning",
            _READER,
            "    return slice(begin, begin + length)",
            "    return slice(0, length)",
            _TWO,
        ),
        ("no-names-of-ties", _DCP, "*further.get(tuple(path), ())", "*()", _RANKS),
        ("files-anywhere", _READER, "        if path.parent != self.path:\n", "        if False:\n", _TWO),
        (
            "values-of-a-trace",
            _READER,
            "            with outside_of_traces():\n",
            "            if True:\n",
            _RANKS,
        ),
    )
)
