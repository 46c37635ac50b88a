"""The peers on the CPU. Each is optional, and is left out where it is not installed.

PyTorch and NumPy have no such ops: their peers are what their users write (`forms`).
"""

import os
from functools import partial

import numpy as np

from .base import Case, Peer
from .check import log_decay, softmax_chunks
from .forms import chunked, recurrent, softmax, ssd_products, ssd_sums
from .inputs import aligned, gradient

OF_RULES = ("x", "y", "bonus", "eta")  # what some rules have besides
ARRAYS = ("q", "k", "v", "g", "gamma", "slopes", "beta", *OF_RULES)  # in the order of Gradients
SCALAR = ("none", "head", "token")  # the decays that have a chunked form here
SOFTMAX_TIMES = 2**28  # H T^2 at most: one head of 2^14 tokens is a second on a core


def step_of(form, of):
    """A step that keeps its state from call to call."""
    state = [None]

    def step():
        o, state[0] = form(state[0])
        return (of(o),)

    return step


def numpy_peers(threads):
    def make(case, x):
        arrays = *(x[name] for name in "qkv"), log_decay(np, x), x.get("beta")
        if case.pass_ == "step":
            more = {name: x.get(name) for name in OF_RULES}
            return step_of(lambda S: recurrent(np, *arrays, S=S, **more), lambda o: o[:, 0])
        return lambda: (chunked(np, *arrays),)

    def has(case):
        if case.system or case.dtype != "float32":
            return False
        return case.pass_ == "step" or (case.pass_ == "forward" and case.variant.decay in SCALAR)

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    core = os.environ.get("OPENBLAS_CORETYPE")
    about = f"{np.__version__}, {blas.get('name')} {blas.get('version')}" + (
        f", OPENBLAS_CORETYPE={core}" if core else ""
    )
    return [Peer("NumPy", about, make, has)]


def torch_peers(threads):
    import torch

    torch.set_num_threads(threads)

    def tensor(a):
        if a.dtype.name == "bfloat16":
            return torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(a)

    def has_loop(case):
        if case.system or (case.pass_ == "forward+backward" and case.variant.decay in SCALAR):
            return False
        return case.T <= Case.T

    def has_chunks(case):
        return not case.system and case.pass_ != "step" and case.variant.decay in SCALAR

    def has_ssd(case):
        return case.op == "ssd" and case.pass_ == "forward" and case.dtype == "float32"

    def ssd_maker(form):
        def make(case, x):
            x = {name: tensor(a) for name, a in x.items()}
            return torch.inference_mode()(lambda: (form(torch, **x),))

        return make

    def maker(solve):
        def make(case, x):
            x = {name: tensor(x[name]) for name in ARRAYS if name in x}

            def forward(x, S=None):
                x = {name: a.float() for name, a in x.items()}
                arrays = x["q"], x["k"], x["v"], log_decay(torch, x), x.get("beta")
                more = {name: x.get(name) for name in OF_RULES}
                return (
                    recurrent(torch, *arrays, S=S, **more)
                    if solve == "loop"
                    else (chunked(torch, *arrays, solve=solve), None)
                )

            if case.pass_ == "step":
                return torch.inference_mode()(step_of(lambda S: forward(x, S), lambda o: o[:, 0]))
            if case.pass_ == "forward":
                return torch.inference_mode()(lambda: (forward(x)[0],))
            leaves = {name: a.clone().requires_grad_() for name, a in x.items()}
            do = tensor(gradient(case))

            def both():
                o = forward(leaves)[0]
                return (o.detach(), *torch.autograd.grad(o, list(leaves.values()), do))

            return both

        return make

    def peer(name, make, has):
        return Peer(
            f"PyTorch, {name}", torch.__version__, make, has, numpy=lambda a: a.float().numpy()
        )

    def has_solver(case):
        return has_chunks(case) and case.delta

    return [
        peer("chunked", maker("rows"), has_chunks),
        peer("chunked, triangular solve", maker("library"), has_solver),
        peer("token loop", maker("loop"), has_loop),
        peer("minimal SSD", ssd_maker(ssd_sums), has_ssd),
        peer("minimal SSD, few products", ssd_maker(ssd_products), has_ssd),
    ]


def onnxruntime_peers(threads):
    """The LinearAttention of ONNX Runtime's own domain, which its CPU provider has."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    def has(case):
        return case.pass_ != "forward+backward" and case.dtype == "float32" and case.ordinary

    def make(case, x):
        g, B, step, D = log_decay(np, x), case.B, case.pass_ == "step", case.D
        feed = {name: x[name].reshape(B, case.T, -1) for name in "qkv"}
        if step:
            feed["past"] = np.zeros((B, case.HV, D, D), np.float32)
        if g is not None:
            feed["g"] = np.ascontiguousarray(g).reshape(B, case.T, -1)
        if case.delta:
            feed["beta"] = x["beta"].reshape(B, case.T, -1)
        names = [name if name in feed else "" for name in ("q", "k", "v", "past", "g", "beta")]
        rule = "_".join(["gated"] * (g is not None) + ["delta"] * case.delta) or "linear"
        node = helper.make_node(
            "LinearAttention",
            names,
            ["o", "state"],
            domain="com.microsoft",
            update_rule=rule,
            q_num_heads=case.H,
            kv_num_heads=case.HV,
            scale=D**-0.5,
        )
        shapes = {"o": (B, case.T, case.HV * D), "state": (B, case.HV, D, D)}
        values = {
            name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in (*((n, a.shape) for n, a in feed.items()), *shapes.items())
        }
        graph = helper.make_graph(
            [node], "linear_attention", [values[n] for n in feed], [values[n] for n in shapes]
        )
        model = helper.make_model(
            graph,
            ir_version=10,
            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        runner = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        # Bound once, so that a call copies nothing. A step's state is written where it was read, as
        # ours is. Arrays begin where its own allocator would let them: elsewhere it is up to twice
        # as slow.
        held = {name: aligned(shape) for name, shape in shapes.items()}
        for name, a in feed.items():
            held[name] = aligned(a.shape)
            held[name][:] = a
        held["state"] = held.get("past", held["state"])
        binding = runner.io_binding()
        for name in feed:
            binding.bind_cpu_input(name, held[name])
        for name in shapes:
            a = held[name]
            binding.bind_output(name, "cpu", 0, np.float32, a.shape, a.ctypes.data)
        o = held["o"].reshape(B, case.T, case.HV, D)

        def run():
            runner.run_with_iobinding(binding)
            return (o[:, 0] if step else o,)

        run.held = held  # the binding has their addresses only
        return run

    return [Peer("ONNX Runtime", ort.__version__, make, has)]


def wants_softmax(case):
    """The case whose inputs softmax attention takes too: q, k and v alone."""
    return case.op == "linear_attention" and case.pass_ == "forward"


def softmax_peers(threads):
    """Softmax attention: PyTorch's where it is installed, else as a user of NumPy writes it."""

    def has(case):
        return (
            wants_softmax(case)
            and case.dtype == "float32"
            and case.B * case.H * case.T**2 <= SOFTMAX_TIMES
        )

    instead = partial(softmax_chunks, np)
    try:
        import torch
    except ImportError:

        def make(case, x):
            return lambda: (softmax(x["q"], x["k"], x["v"]),)

        return [Peer("softmax, NumPy", np.__version__, make, has, instead=instead)]
    torch.set_num_threads(threads)

    def make(case, x):
        arrays = [torch.from_numpy(x[name]).transpose(1, 2).contiguous() for name in "qkv"]
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.inference_mode()(lambda: (attend(*arrays, is_causal=True).transpose(1, 2),))

    return [
        Peer(
            "softmax, PyTorch",
            torch.__version__,
            make,
            has,
            numpy=lambda o: o.numpy(),
            instead=instead,
        )
    ]


def ggml_peers(threads):
    from . import ggml

    return ggml.peers(threads)


MAKERS = {
    "NumPy": numpy_peers,
    "PyTorch": torch_peers,
    "ONNX Runtime": onnxruntime_peers,
    "ggml": ggml_peers,
    "softmax": softmax_peers,
}


def available(makers, *arguments):
    """The peers that can run here; and those that cannot, by name, with the reason."""
    found, missing = [], []
    for name, make in makers.items():
        try:
            found += make(*arguments)
        # A peer may compile, look for a GPU and for other peers while it is imported. It may raise
        # anything then, and the others are still to be measured.
        except Exception as error:
            text = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            missing.append((name, f"{text}{error}".split("\n")[0]))
    return found, missing
