"""The option dump_graph: what is computed, as text files.

In: the captured graph and the stages' graphs. Out: files such as `rannc_graph.graph0.txt` and `rannc_graph.graph0.stage1.txt`, with the
operators as Python code, their shapes in comments, and on top what goes in and out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from rannc_backend.deployment_file import write_text
from rannc_backend.passes.split_stages import StageGraph


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
        write_text(path, text, what="graph", named_by="option dump_graph_prefix")
    return list(texts)


def code_of(graph_module: fx.GraphModule) -> str:
    """The operators as Python code, with dtypes and shapes."""
    return graph_module.print_readable(print_output=False, include_stride=False, include_device=False) + "\n"
