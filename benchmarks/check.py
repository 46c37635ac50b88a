"""Every call is checked before it is timed, against the reference in float64.

On the CPU the check is of a shorter problem against `linattn.reference`; on a GPU it is of the very
shape that is timed, against the chunked form in float64 on that GPU.
"""

from dataclasses import replace

import numpy as np

from linattn import reference, testing

from .base import CHUNK, WrongResult
from .inputs import gradient, has_tokens, numpy_inputs, options, ours

T, HEADS, STEPS = 192, 2, 3  # three of the peers' chunks; tokens in a row for a step
# rms(out - ref) / rms(ref) of a peer; ours go by the acceptance rule of linattn.testing
PEER_BOUND = {"float32": 1e-5, "bfloat16": 2e-2}
LOCAL = 10  # 64 tokens of a head may be this much worse; one wrong chunk drowns in the whole


def expected(case, x, dtype, form):
    """The right outputs of a shortened case, (o,) or (o, gradients ...), computed at dtype."""
    if case.system:
        return (of_system(case, x, dtype, form),)
    form = form | options(case)
    if case.pass_ == "step":  # one token, again and again
        x = {name: np.repeat(a, STEPS, 1) if has_tokens(a) else a for name, a in x.items()}
    o = getattr(reference, case.op)(**x, dtype=dtype, **form)[0]
    if case.pass_ == "forward":
        return (o,)
    if case.pass_ == "step":
        return (o[:, -1],)
    grads = reference.backward(case.op, gradient(case), **x, dtype=dtype, **form)
    return (o, *(d for d in grads[:-1] if d is not None))  # the last is that of the state


def of_system(case, x, dtype, form):
    """The right output of a composed op, by its own reference or, where it has none, by that of the
    op that its recurrence is; the arithmetic around that op is at dtype too."""
    if case.op == "ssd":  # which has one form
        return reference.ssd(**x, dtype=dtype)[0]
    x = {name: a.astype(dtype) for name, a in x.items()}
    q, k, v, g = (x[name] for name in "qkvg")
    form = form | {"dtype": dtype}
    if case.op == "comba":  # S <- exp(g) S + b k v' - b k p', p = S'x before the decay
        y = x["beta"][..., None] * k
        g = np.broadcast_to(g[..., None], k.shape)
        return reference.dplr_delta_rule(q, y, v, g=g, x=x["x"], y=y, **form)[0]
    if case.op == "precond_gated_delta_rule":  # the key m k is written, and k predicts
        written = x["preconditioner"] * k
        return reference.gated_delta_rule(q, written, v, g, x["beta"], x=k, **form)[0]
    assert case.op == "gdn2"  # the value w v is written, and b k predicts
    beta = np.ones(v.shape[:3], dtype)
    return reference.kda(q, k, x["w"] * v, g, beta, x=x["b"] * k, **form)[0]


class Checker:
    """Checks calls on the CPU against references that are computed once per case."""

    def __init__(self):
        self.known = {}

    def problem(self, case):
        alone = case.H == 1 < case.HV  # one head of q and k for all values keeps that
        T_short = 1 if case.pass_ == "step" else T
        case = replace(case, T=T_short, H=1 if alone else HEADS, HV=HEADS)
        if case not in self.known:
            x = numpy_inputs(case)
            self.known[case] = x, expected(case, x, np.float64, {})
        return case, *self.known[case]

    def ours(self, case):
        case, x, wanted = self.problem(case)
        form = {"form": "chunk", "chunk_size": 16} if case.pass_ != "step" else {}
        dtype = next(iter(x.values())).dtype  # the first is q or Mamba's x, of the case's dtype
        naive = expected(case, x, dtype, form)
        got = outputs(case, ours(case, x), np.asarray)
        for i, (out, ref, other) in enumerate(zip(got, wanted, naive, strict=False)):
            if out.size < 1000:  # a decay's gradient per head: too few numbers for a maximum
                self.bounded("linattn", case, i, out, ref)
                continue
            try:
                testing.assert_accurate(
                    out,
                    ref,
                    other,
                    dtype=case.dtype if i else dtype,
                    gradient=i > 0,
                    name=f"{case}, output {i}",
                )
            except AssertionError as error:
                raise WrongResult(f"linattn: {error}") from None

    def peer(self, peer, case):
        case, x, wanted = self.problem(case)
        if peer.instead:
            wanted = (np.concatenate([o for _, o, _ in peer.instead(x)], 2).swapaxes(1, 2),)
        got = outputs(case, peer.make(case, x), peer.numpy)
        for i, (out, ref) in enumerate(zip(got, wanted, strict=True)):
            self.bounded(peer.name, case, i, out, ref)

    def bounded(self, name, case, i, out, ref):
        off = np.sqrt(np.mean((out - ref) ** 2) / np.mean(ref**2))
        if out.shape != ref.shape or not off < PEER_BOUND[case.dtype] * (2 if i else 1):
            raise WrongResult(f"{name}: {case} {case.dtype}, output {i}: rms error {off:.1e}")


def outputs(case, call, to_numpy):
    """The outputs of a call; of a step, o after the same token STEPS times."""
    for _ in range(STEPS if case.pass_ == "step" else 1):
        got = call()
    return [to_numpy(a) for a in (got[:1] if case.pass_ == "step" else got)]


def log_decay(xp, x):
    """The log decay [B,T,HV] or [B,T,HV,K] that the gate stands for, None for none."""
    if "gamma" in x or "slopes" in x:
        per_head = xp.log(x["gamma"]) if "gamma" in x else -x["slopes"]
        return xp.broadcast_to(per_head, x["v"].shape[:3])
    return x.get("g")


def chunks(x):
    """Yields (first token, o [B,HV,C,V], the state after it) for one chunk after another.

    For every decay and rule: with G the running sum of the log decays and
    D[i,j] = exp(G[i] - G[j]) for j <= i, inside a chunk that begins with the state S

        p = (k e^G) S + (k k' D below the diagonal) u     the prediction of the delta rule
        u = v  |  beta (v - p), unit lower triangular in u
        o = scale ((q e^G) S + (q k' D up to the diagonal) u)
        S <- e^(G at the end) S + (k e^(G at the end - G))' u

    A row that looks before its decay, x and under a bonus q, has the line of G and D above its own.
    A second row that is written, y, has scores of its own. `momentum_chunks` has the two states.
    """
    import torch

    if "eta" in x:
        yield from momentum_chunks(x)
        return
    v, S, beta = x["v"], x.get("state"), x.get("beta")
    (B, T, HV, V), K = v.shape, x["k"].shape[-1]
    per_token = {name: a.double() for name, a in x.items() if name in ("g", "gamma", "slopes")}
    g = log_decay(torch, per_token | {"v": v})
    g = v.new_zeros(B, T, HV, 1).double() if g is None else g.reshape(B, T, HV, -1)
    S = v.new_zeros(B, HV, K, V).double() if S is None else S.double()
    for t in range(0, T, CHUNK):
        Q, Key, u = (part(x[name], t, HV) for name in "qkv")
        Q, G = Q * K**-0.5, part(g, t, HV).cumsum(2)
        late = torch.cat([torch.zeros_like(G[:, :, :1]), G[:, :, :-1]], 2)  # the line above
        if "bonus" in x:
            own = (Q * Key * head_rows(x["bonus"], HV)[:, None]).sum(-1)
            read = scores(Q, Key, late, G, -1) + torch.diag_embed(own)
            o = (Q * late.exp()) @ S + read @ u
        elif "y" in x:
            X, Y = part(x["x"], t, HV), part(x["y"], t, HV)
            p = (X * late.exp()) @ S + scores(X, Key, late, G, -1) @ u
            p = solved(scores(X, Y, late, G, -1), p)
            o = (Q * G.exp()) @ S + scores(Q, Key, G, G) @ u - scores(Q, Y, G, G) @ p
        else:
            if beta is not None:
                b = part(beta, t, HV)[..., None]
                u = solved(b * scores(Key, Key, G, G, -1), b * (u - (Key * G.exp()) @ S))
            o = (Q * G.exp()) @ S + scores(Q, Key, G, G) @ u
        faded = (G[:, :, -1:] - G).exp()
        S = G[:, :, -1].exp()[..., None] * S + (Key * faded).mT @ u
        if "y" in x:
            S = S - (Y * faded).mT @ p
        yield t, o, S


def part(a, t, HV):
    """The rows of the chunk from token t on, [B,HV,C,...], in float64."""
    a = a[:, t : t + CHUNK].double().transpose(1, 2)
    return a.repeat_interleave(HV // a.shape[1], 1)


def head_rows(a, HV):
    """[H,K] as [HV,K], in float64."""
    return a.double().repeat_interleave(HV // a.shape[0], 0)


def solved(L, right):
    """u of (I + L) u = right, L strictly lower."""
    import torch

    return torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True)


def scores(rows, keys, G_rows, G, diagonal=0):
    """rows_i . (e^(G_rows[i] - G[j]) * keys_j) for j <= i + diagonal."""
    import torch

    lower = torch.ones(G.shape[2], G.shape[2], dtype=torch.bool, device=G.device).tril(diagonal)
    D = G_rows[:, :, :, None] - G[:, :, None]  # above the diagonal it may be large: cut, then exp
    D = D.masked_fill_(~lower[:, :, None], -torch.inf).exp_()
    if D.shape[-1] == 1:
        return rows @ keys.mT * D[..., 0]
    return (rows[:, :, :, None, :] @ (D * keys[:, :, None]).mT)[:, :, :, 0]


def momentum_chunks(x):
    """chunks of a memory M with a momentum Y: the state is both, [2,B,HV,K,V].

    Write j counts N[i,j] in Y and G[i,j] in M after token i, and the states before the chunk count
    e and f in M, m in Y. These run down the chunk, a token at a time.
    """
    import torch

    (B, T, HV, V), K = x["v"].shape, x["k"].shape[-1]
    first = x["v"].new_zeros(B, HV, K, V).double()
    M, Y = (z.double() for z in x.get("state", (first, first)))
    for t in range(0, T, CHUNK):
        Q, Key, v, g, beta, eta = (part(x[n], t, HV) for n in ("q", "k", "v", "g", "beta", "eta"))
        Q, a, C = Q * K**-0.5, g.exp(), g.shape[2]
        one = torch.ones_like(a[:, :, 0])
        e, f, m, rows = [one], [0 * one], [one], [Key.new_zeros(B, HV, C)]
        N = rows[0]
        for i in range(C):
            decay, keep = a[:, :, i], eta[:, :, i]
            m.append(keep * m[-1])
            f.append(decay * f[-1] + m[-1])
            e.append(decay * e[-1])
            N = keep[..., None] * N
            N[:, :, i] = 1
            rows.append(decay[..., None] * rows[-1] + N)
        e, f, G = (torch.stack(z, 2)[..., None] for z in (e, f, rows))
        G, b = G[..., 0], beta[..., None]
        L = b * G[:, :, :-1] * (Key @ Key.mT)
        u = solved(L.tril(-1), b * (v - e[:, :, :-1] * (Key @ M) - f[:, :, :-1] * (Key @ Y)))
        o = e[:, :, 1:] * (Q @ M) + f[:, :, 1:] * (Q @ Y) + (G[:, :, 1:] * (Q @ Key.mT)) @ u
        M = e[:, :, -1:] * M + f[:, :, -1:] * Y + (G[:, :, -1, :, None] * Key).mT @ u
        Y = m[-1][..., None, None] * Y + (N[..., None] * Key).mT @ u
        yield t, o, torch.stack((M, Y))


def softmax_chunks(xp, x):
    """The same of causal softmax attention of q, k and v, as arrays of xp, numpy or torch. There is
    no state."""
    q, k, v = (xp.asarray(x[name], dtype=xp.float64).swapaxes(1, 2) for name in "qkv")
    for t in range(0, q.shape[2], CHUNK):
        end = t + CHUNK
        scores = q[:, :, t:end] @ k[:, :, :end].swapaxes(-1, -2) * q.shape[-1] ** -0.5
        weights = xp.tril(xp.exp(scores - xp.amax(scores, -1, keepdims=True)), t)
        yield t, weights @ v[:, :, :end] / weights.sum(-1, keepdims=True), None


def errors(case, x, computed, right_chunks=chunks):
    """For each (o,) or (o, state) of `computed` its relative errors (of all, of the worst chunk).

    NaN where the output has one; a wrong shape is an infinite error.
    """
    import torch

    computed = [
        (o[:, None], *state) if case.pass_ == "step" else (o, *state) for o, *state in computed
    ]  # a step's o has one token and no axis for it
    sums = [[0.0, 0.0] for _ in computed]  # squares: of errors, the worst chunk's share
    size, after = 0.0, None
    right = [o.shape == x["v"].shape for o, *_ in computed]
    for t, ref, after in right_chunks(x):  # noqa: B007 -- the last one is wanted
        squares = ref.square()
        size += squares.sum()
        local = squares.mean((2, 3)).clamp_min(1e-300)
        for each, (o, *_), fits in zip(sums, computed, right, strict=True):
            if fits:
                off = (o[:, t : t + CHUNK].double().transpose(1, 2) - ref).square_()
                each[0] += off.sum()
                each[1] = torch.maximum(
                    torch.as_tensor(each[1], device=off.device), (off.mean((2, 3)) / local).max()
                )  # keeps a NaN
    found = []
    for each, (_, *state), fits in zip(sums, computed, right, strict=True):
        if not fits:
            found.append((float("inf"), float("inf")))
            continue
        whole, worst = float(each[0] / size) ** 0.5, float(each[1]) ** 0.5
        if state:
            off = float((state[0].double() - after).square().sum() / after.square().sum()) ** 0.5
            whole = whole if whole > off or whole != whole else off
        found.append((whole, worst))
    return found


def verdict(whole, worst, dtype="bfloat16"):
    """Why an output with these errors, rms(out - ref) / rms(ref), is refused, or ""."""
    bound = testing.RMS_BOUND_TF32 if dtype == "tf32" else testing.RMS_BOUND[dtype]
    if whole < bound and worst < LOCAL * bound:
        return ""
    return (
        f"wrong: rms error {whole:.1e} of all, {worst:.1e} of the worst chunk, "
        f"expected < {bound:.0e}, < {LOCAL * bound:.0e}"
    )
