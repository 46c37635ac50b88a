"""What others offer for the same problems. Each is optional: what is not installed is not run.

PyTorch and NumPy have no such ops, so theirs are what their users write: the chunked form (matrix
products over chunks of 64, as the fallback of transformers for the gated delta rule) and the loop
over tokens, both written here from the mathematics of docs/math.md.
"""

import os
from dataclasses import dataclass

import numpy as np
from cases import K, T, V, aligned, gradient

CHUNK = 64
SCALE = K**-0.5
ARRAYS = ("q", "k", "v", "g", "gamma", "slopes", "beta")  # in the order of Gradients
PER_KEY = ("gla", "kda")


@dataclass(frozen=True)
class Peer:
    """make(case, inputs) gives the call to time, or None where the peer has no such op; every
    array of what the call returns goes through `numpy` to be checked."""

    name: str
    version: str
    make: object
    numpy: object = np.asarray


def log_decay(xp, op, x):
    """The log decay [B,T,H] or [B,T,H,K] that the op's gate stands for, None for none."""
    if op in ("retention", "lightning_attention"):
        per_head = xp.log(x["gamma"]) if op == "retention" else -x["slopes"]
        return xp.broadcast_to(per_head, x["q"].shape[:3])
    return x.get("g")


def chunked(xp, q, k, v, g, beta, solve="rows", C=CHUNK):
    """Chunks of C tokens as matrix products; g [B,T,H] or None, beta [B,T,H] or None.

    q, k, v [B,T,H,D], T a multiple of C. With beta, the errors u of a chunk solve the unit lower
    triangular system (I + L) u = beta (v - decayed k' S), L = strictly lower (beta k k' * decay):
    row after row as transformers does ("rows"), or by the library's own solver ("library").
    """
    B, T, H, D = q.shape
    def heads_first(x):
        x = x.reshape(B, T // C, C, H, *x.shape[3:])
        axes = (0, 3, 1, 2, 4)[:x.ndim]
        return x.permute(*axes).contiguous() if hasattr(x, "permute") else x.transpose(axes).copy()
    q, k, v = heads_first(q) * SCALE, heads_first(k), heads_first(v)  # [B,H,N,C,D]
    k_t = k.swapaxes(-1, -2)
    if g is None:
        grown = faded = decay = last = None
    else:
        G = xp.cumsum(heads_first(g), -1)
        # above the diagonal the exponent may be large: cut before exp as well as after
        decay = xp.tril(xp.exp(xp.tril(G[..., :, None] - G[..., None, :])))
        grown, last = xp.exp(G)[..., None], xp.exp(G[..., -1])[..., None, None]
        faded = xp.exp(G[..., -1:] - G)[..., None]
    scores = q @ k_t
    scores = xp.tril(scores) if g is None else scores * decay
    if beta is not None:
        beta = heads_first(beta)[..., None]
        k_beta = k * beta
        L = k_beta @ k_t
        L = xp.tril(L if g is None else L * decay, -1)
        right = xp.concatenate([v * beta, k_beta if g is None else k_beta * grown], -1)
        if solve == "library":
            right = xp.linalg.solve_triangular(L, right, upper=False, unitriangular=True)
        else:
            right = inverse_by_rows(xp, L) @ right
        v, w = right[..., :V], right[..., V:]
    q = q if g is None else q * grown
    k_t = k_t if g is None else (k * faded).swapaxes(-1, -2)
    S, rows = xp.zeros((B, H, D, V), dtype=v.dtype), []
    for n in range(T // C):
        u = v[:, :, n] if beta is None else v[:, :, n] - w[:, :, n] @ S
        rows.append(q[:, :, n] @ S + scores[:, :, n] @ u)
        S = (S if g is None else S * last[:, :, n]) + k_t[:, :, n] @ u
    return xp.stack(rows, 2).reshape(B, H, T, V).swapaxes(1, 2)


def inverse_by_rows(xp, L):
    """(I + L)^-1, one row of every chunk at a time: row i is -L[i] times the rows above it."""
    copy = L.clone if hasattr(L, "clone") else L.copy
    X, C = -copy(), L.shape[-1]
    for i in range(1, C):
        row, above = X[..., i:i + 1, :i], X[..., :i, :i]
        if hasattr(L, "clone"):  # autograd keeps them, and X changes
            row, above = row.clone(), above.clone()
        X[..., i:i + 1, :i] = row + row @ above
    return X + xp.eye(C, dtype=L.dtype)


def recurrent(xp, q, k, v, g, beta, S=None):
    """A loop over the tokens; g [B,T,H] or [B,T,H,K] or None. Returns o and the state."""
    B, T, H, D = q.shape
    S, rows = xp.zeros((B, H, D, V), dtype=v.dtype) if S is None else S, []
    a = None if g is None else xp.exp(g)
    for t in range(T):
        if a is not None:
            S = S * (a[:, t, ..., None] if a.ndim == 4 else a[:, t, ..., None, None])
        u = v[:, t]
        if beta is not None:
            u = (u - (k[:, t, :, None] @ S)[..., 0, :]) * beta[:, t, :, None]
        S = S + k[:, t, :, :, None] * u[..., None, :]
        rows.append(SCALE * (q[:, t, :, None] @ S)[..., 0, :])
    return xp.stack(rows, 1), S


def numpy_peers():
    def make(case, x):
        if case.dtype != "float32" or case.face == "forward+backward":
            return None
        g = log_decay(np, case.op, x)
        arrays = *(x[name] for name in "qkv"), g, x.get("beta")
        if case.face == "step":
            state = [None]

            def step():
                o, state[0] = recurrent(np, *arrays, S=state[0])
                return (o[:, 0],)
            return step
        if case.op in PER_KEY:
            return None
        return lambda: (chunked(np, *arrays),)
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    core = os.environ.get("OPENBLAS_CORETYPE")
    about = f"{np.__version__}, {blas.get('name')} {blas.get('version')}" + (
        f", OPENBLAS_CORETYPE={core}" if core else "")
    return [Peer("NumPy", about, make)]


def torch_peers(threads):
    import torch

    torch.set_num_threads(threads)

    def tensor(a):
        if a.dtype.name == "bfloat16":
            return torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(a)

    def maker(form):
        def make(case, x):
            loop = form == "loop"
            if case.face == "step":
                if not loop:
                    return None
            elif (loop and case.T > T) or (not loop and case.op in PER_KEY):
                return None
            elif loop and case.face == "forward+backward" and case.op not in PER_KEY:
                return None
            if form == "library" and "beta" not in x:
                return None
            x = {name: tensor(x[name]) for name in ARRAYS if name in x}

            def forward(x, S=None):
                x = {name: a.float() for name, a in x.items()}
                arrays = x["q"], x["k"], x["v"], log_decay(torch, case.op, x), x.get("beta")
                return recurrent(torch, *arrays, S=S) if loop else (
                    chunked(torch, *arrays, solve=form), None)

            state = [None]

            @torch.inference_mode()
            def step():
                o, state[0] = forward(x, state[0])
                return (o[:, 0],)

            @torch.inference_mode()
            def infer():
                return (forward(x)[0],)

            if case.face == "step":
                return step
            if case.face == "forward":
                return infer
            leaves = {name: a.clone().requires_grad_() for name, a in x.items()}
            do = tensor(gradient(case))

            def both():
                o = forward(leaves)[0]
                return (o.detach(), *torch.autograd.grad(o, list(leaves.values()), do))
            return both
        return make
    about = torch.__version__
    return [Peer("PyTorch, chunked", about, maker("rows"), to_numpy),
            Peer("PyTorch, chunked, triangular solve", about, maker("library"), to_numpy),
            Peer("PyTorch, token loop", about, maker("loop"), to_numpy)]


def to_numpy(tensor):
    return tensor.float().numpy()


RULES = {"linear_attention": "linear", "delta_rule": "delta", "gated_delta_rule": "gated_delta",
         "kda": "gated_delta"}


def onnxruntime_peers(threads):
    """The LinearAttention of ONNX Runtime's own domain, which its CPU provider has."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    def make(case, x):
        if case.face == "forward+backward" or case.dtype != "float32":
            return None
        g, B, step = log_decay(np, case.op, x), 1, case.face == "step"
        feed = {name: x[name] for name in "qkv"}
        if step:
            feed["past"] = np.zeros((B, case.heads, K, V), np.float32)
        if g is not None:
            feed["g"] = np.ascontiguousarray(g)
        if "beta" in x:
            feed["beta"] = x["beta"]
        feed = {name: a if name == "past" else a.reshape(B, case.T, -1)
                for name, a in feed.items()}
        names = [name if name in feed else "" for name in ("q", "k", "v", "past", "g", "beta")]
        node = helper.make_node(
            "LinearAttention", names, ["o", "state"], domain="com.microsoft",
            update_rule=RULES.get(case.op, "gated"), q_num_heads=case.heads,
            kv_num_heads=case.heads, scale=SCALE)
        shapes = {"o": (B, case.T, case.heads * V), "state": (B, case.heads, K, V)}
        values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                  for name, shape in (*((n, a.shape) for n, a in feed.items()), *shapes.items())}
        graph = helper.make_graph([node], "linear_attention", [values[n] for n in feed],
                                  [values[n] for n in shapes])
        model = helper.make_model(graph, ir_version=10, opset_imports=[
            helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        runner = ort.InferenceSession(model.SerializeToString(), options,
                                      providers=["CPUExecutionProvider"])
        # bound once: a call copies nothing; a step's state is written where it was read, as ours
        # and arrays begin where its own allocator would let them: it is up to half as fast else
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
        o = held["o"].reshape(B, case.T, case.heads, V)

        def run():
            runner.run_with_iobinding(binding)
            return (o[:, 0] if step else o,)
        run.held = held  # the binding has their addresses only
        return run
    return [Peer("ONNX Runtime", ort.__version__, make)]


def ggml_peers(threads):
    import ggml

    return ggml.ggml_peers(threads)


def available(threads):
    """The peers that can run here; and those that cannot, by name, with the reason."""
    found, missing = [], []
    for name, make in (("NumPy", lambda t: numpy_peers()), ("PyTorch", torch_peers),
                       ("ONNX Runtime", onnxruntime_peers), ("ggml", ggml_peers)):
        try:
            found += make(threads)
        except ImportError as error:
            missing.append((name, str(error)))
    return found, missing
