"""generate() of a model of transformers with a static cache, the model compiled or not."""

from support.tensors import torch

OPTIONS = {"do_sample": False, "cache_implementation": "static", "disable_compile": True}


def generated(made, tokens, **options):
    return made.generate(tokens, **OPTIONS, **options)


def by_a_compiled_model(made, tokens, **options):
    """The tokens, the number of graphs, and how often one broke. The compiler reads the code of the
    model, and then runs what it read: a CUDA graph is made of the same."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    made.forward = torch.compile(made.forward, backend="eager")
    try:
        found = generated(made, tokens, **options)
    finally:
        del made.forward
        torch._dynamo.reset()
    return found, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
