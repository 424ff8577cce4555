"""What the terms on the page of a plan mean: the page's tooltips and the table in docs/glossary.md.

In: nothing. Out: `MEANINGS`, by term; a name on the page may be a term and more ("peak float32").
"""

from __future__ import annotations

from types import MappingProxyType

_OF_PAGE = {
    "step": "seconds from when all ranks begin one training step until the last is done, predicted by "
    "simulation; without the optimizer, with its new values sent to other replicas under ZeRO",
    "stages": "sets of nodes that one group of ranks computes each; together they are the model",
    "micro-batches": "intervals of the rows of the global batch; what one forward of a stage works on",
    "schedule": "the order of forwards and backwards: 1f1b bounds what is kept, fill_drain runs all forwards "
    "first; zb_h1, zb_v, v_half and list_scheduled run weight gradients by themselves, where a rank would be idle; interleaved "
    "has two or more stages on each rank, zb_v and v_half two, v_half with half of the memory of 1f1b on all",
    "lower bound": "seconds below which no order of these stages' forwards and backwards can bring the step: of each "
    "rank its work, after the earliest start and before the shortest end; and the longest chain of one micro-batch",
    "stages run by": "what runs a stage: inductor compiles it, eager calls its operators one by one",
    "zero": "levels of division: 1, a parameter's optimizer state is on one replica of its stage; 2, so is its "
    "gradient between steps",
    "recompute": "what backward computes again instead of keeping it, where the user names it and the search does not choose",
    "offload": "parameters: parameters, their gradients and the optimizer state lie on the host; a stage has copies on its "
    "device from its first forward of a call to its last backward, and sums gradients there",
    "sparse gradients": "gradients of embeddings with sparse=True, which are kept, and exchanged, as the rows that a batch looks "
    "up, bounded by the rows of a table on each rank",
    "in fewer bits": "what boundary_dtype and gradient_dtype round where it is sent; what that saves is beside the same plan "
    "with all as it is",
    "idle time": "share of the step in which a rank computes nothing, the mean over the ranks: filling, "
    "draining, waiting",
    "peak memory": "the most that one rank needs at one time, of all ranks the fullest",
    "against equal stages": "how many times as fast as the best plan with equally many blocks and replicas "
    "in every stage",
    "proof": "the search proves how much faster a plan that it did not look at could be, for these blocks, "
    "costs and settings; not for orders that are made for a plan",
    "bound by": "what gains most of one more device, twice the memory and twice the link speed, each planned "
    "again",
    "timeline": "the simulated step: what each stage computes when; its ranks do the same at the same time",
    "forward": "computing the outputs of a stage; seconds are those of one micro-batch on one rank",
    "backward": "computing the gradients of a stage, with what is computed again; seconds are those of one "
    "micro-batch on one rank",
    "weight gradients": "the part of a backward that no other stage waits for, where the schedule runs it by itself",
    "all-reduce": "adding up the gradients over the replicas of a stage, once per step, most of it beside "
    "the last backward",
    "idle": "the stage computes nothing: it waits for a message, or has nothing left to do",
    "transfer": "the message from the stage before, and the gradients back, for one micro-batch; runs beside "
    "computing",
    "kept": "share of the activations that are kept for backward; the others are computed again; segments: "
    "what goes from segment to segment is kept; marked: what the model marks; around modules: all but what stays inside "
    "of the modules that recompute_modules names",
    "memory": "what one rank of each stage needs at its fullest moment",
    "weights": "the parameters and buffers of a stage's modules",
    "gradients": "one for each element of a trained parameter",
    "optimizer state": "what the optimizer keeps for each trained element: two more values with Adam",
    "activations": "what forward keeps for backward, of all micro-batches that are under way at one time; or what an "
    "optimizer's step needs (opt_transient_factor), where that is more",
    "buffers": "messages, and outputs that stay until the step ends",
    "workspace": "what an operator needs while it runs, beside its inputs and outputs",
    "limit": "bytes that a plan may use per device: its memory, or the option mem_limit_gb, less the margin",
    "where the model is cut": "the tree of modules; a module with several stages is cut",
    "alternatives": "the best plans of other kinds that were found, and why they lost",
    "what if": "the best plan after one change of the machines, or without one option; the share is that of the step",
    "cluster assumed": "the machines that the plan was made for, described or measured",
    "cluster": "the name of the description: one that is shipped, a file, or local, which is measured",
    "devices": "what one rank computes on: a GPU, or a process's share of a CPU",
    "memory of a device": "what a device has, and what is left of it for plans by the limit",
    "memory bandwidth": "bytes that a device reads and writes per second at best",
    "peak": "operations on numbers of this type per second at best",
    "reached by": "share of the peak that operators of this class reach",
    "start of an operator": "seconds that every operator takes at least, however small",
    "link within a node": "how fast one device sends to another of its node, and what each message costs "
    "however small",
    "link between nodes": "how fast one device sends to one of another node, and what each message costs "
    "however small",
    "costs": "where seconds and bytes come from: analytic from the description, measured on the machine, or "
    "rules",
}
MEANINGS = MappingProxyType(_OF_PAGE)


def meaning(name: str) -> str:
    """What a name on the page means: that of the longest term that it is, or begins with. KeyError where
    there is none.
    """
    words = name.lower().split()
    for count in range(len(words), 0, -1):
        term = " ".join(words[:count])
        if term in MEANINGS:
            return MEANINGS[term]
    raise KeyError(name)
