"""The option dump_graph: what is computed, as text files.

In: the captured graph and the stages' graphs. Out: files such as `rannc_graph.graph0.txt` and
`rannc_graph.graph0.stage1.txt`, with the operators as Python code, their shapes in comments, and on top what
goes in and out. And every pass: `rannc_graph.passes/rank0/07_batch_axis.txt` (passes/pipeline.py says how
files are named) is the graph after the seventh pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from torch import fx

from rannc_backend.ir.plan_file import output_file, write_text
from rannc_backend.passes.pipeline import GraphDump
from rannc_backend.passes.stage.split_stages import StageGraph
from rannc_backend.settings.user_files import make_directory

_NAMED_BY = "option dump_graph_prefix"


def dump_graphs(prefix: str, label: str, whole: fx.GraphModule, stages: Sequence[StageGraph]) -> list[str]:
    """Write one file for the whole graph and one for each stage; gives their paths. `label`: "graph 0".

    Raises UserInputError: a file cannot be written.
    """
    name = f"{prefix}.{label.replace(' ', '')}"
    texts = {f"{name}.txt": f"# {label}, whole\n{code_of(whole)}"}
    for stage in stages:
        head = [f"# {label}, stage {stage.index} of {len(stages)}"]
        head += [f"# in:  {slot.kind} {slot.name}" for slot in stage.inputs]
        head += [f"# out: {slot.kind} {slot.name}" for slot in stage.outputs]
        texts[f"{name}.stage{stage.index}.txt"] = "\n".join(head) + f"\n{code_of(stage.graph_module)}"
    for path, text in texts.items():
        write_text(path, text, what="graph", named_by=_NAMED_BY)
    return list(texts)


@functools.cache
def pass_dump(prefix: str, rank: int) -> GraphDump:
    """Where this rank writes the graphs before and after every pass; the same object each time, so that the
    numbers go on. Raises UserInputError when a file cannot be written.
    """
    folder = Path(f"{prefix}.passes") / f"rank{rank}"

    def write(name: str, text: str) -> None:
        make_directory(output_file(folder, what="folder of graphs", named_by=_NAMED_BY))
        write_text(folder / name, text, what="graph", named_by=_NAMED_BY)

    return GraphDump(write=write)


def code_of(graph_module: fx.GraphModule) -> str:
    """The operators as Python code, with dtypes and shapes."""
    return graph_module.print_readable(print_output=False, include_stride=False, include_device=False) + "\n"
