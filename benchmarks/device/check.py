"""Whatever is timed is right first: against float64, at the very shape that is timed."""

import torch

from linattn.testing import RMS_BOUND, RMS_BOUND_TF32

CHUNK = 64
LOCAL = 10  # times as wrong one head's 64 tokens may be: one wrong chunk drowns in the whole


def decay(op, x, shape):
    """The log decay as [B,T,HV,K] or [B,T,HV,1], float64."""
    if op in ("retention", "lightning_attention"):
        per_head = x["gamma"].double().log() if op == "retention" else -x["slopes"].double()
        return per_head[:, None].expand(*shape, 1)
    if "g" not in x:
        return torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=x["v"].device).expand(*shape, 1)
    return x["g"].double().reshape(*shape, -1)


def reference(op, x):
    """Yields (first token, o [B,HV,C,V], the state after it) for one chunk after another.

    All six pairs of decay and rule: with G the running sum of the log decays and
    D[i,j] = exp(G[i] - G[j]) for j <= i, inside a chunk that begins with the state S

        p = (k e^G) S + (k k' D below the diagonal) u     what the delta rule predicts
        u = v  |  beta (v - p), unit lower triangular in u
        o = scale ((q e^G) S + (q k' D up to the diagonal) u)
        S <- e^(G at the end) S + (k e^(G at the end - G))' u
    """
    q, k, v = (x[name] for name in "qkv")
    g, beta, state = decay(op, x, v.shape[:3]), x.get("beta"), x.get("state")
    (B, T, HV, V), K = v.shape, k.shape[-1]
    S = torch.zeros(B, HV, K, V, dtype=torch.float64, device=v.device) if state is None else (
        state.double())
    for t in range(0, T, CHUNK):
        def part(a, t=t):
            a = a[:, t:t + CHUNK].double().transpose(1, 2)  # [B,H,C,...]
            return a.repeat_interleave(HV // a.shape[1], 1)
        Q, Key, u, G = part(q) * K**-0.5, part(k), part(v), part(g).cumsum(2)
        grown = G.exp()
        lower = torch.ones(G.shape[2], G.shape[2], dtype=torch.bool, device=v.device).tril()
        D = G[:, :, :, None] - G[:, :, None]  # above the diagonal it may be large: cut, then exp
        D = D.masked_fill_(~lower[:, :, None], -torch.inf).exp_()
        if D.shape[-1] == 1:
            read, seen = Q @ Key.mT * D[..., 0], Key @ Key.mT * D[..., 0]
        else:
            D *= Key[:, :, None]
            read, seen = ((a[:, :, :, None, :] @ D.mT)[:, :, :, 0] for a in (Q, Key))
        if beta is not None:
            b = part(beta)[..., None]
            right = b * (u - (Key * grown) @ S)
            u = torch.linalg.solve_triangular((b * seen).tril(-1), right, upper=False,
                                              unitriangular=True)
        o = (Q * grown) @ S + read @ u
        S = grown[:, :, -1, :, None] * S + (Key * (G[:, :, -1:] - G).exp()).mT @ u
        yield t, o, S


def errors(case, x, outputs):
    """For each (o, state or None) of `outputs` its worst relative errors (of all, of one chunk).

    NaN where the output has one; a wrong shape is an infinite error.
    """
    if case.face == "step":  # one token
        x = {name: a[:, None] if name in ("q", "k", "v", "g", "beta") else a
             for name, a in x.items()}
        outputs = [(o[:, None], S) for o, S in outputs]
    sums = [[0.0, 0.0] for _ in outputs]  # squares: of errors, the worst chunk's share
    size, after = 0.0, None
    right = [o.shape == x["v"].shape for o, _ in outputs]
    for t, ref, after in reference(case.op, x):  # noqa: B007 -- the last one is wanted
        squares = ref.square()
        size += squares.sum()
        local = squares.mean((2, 3)).clamp_min(1e-300)
        for each, (o, _), fits in zip(sums, outputs, right, strict=True):
            if fits:
                off = (o[:, t:t + CHUNK].double().transpose(1, 2) - ref).square_()
                each[0] += off.sum()
                each[1] = torch.maximum(torch.as_tensor(each[1], device=off.device),
                                        (off.mean((2, 3)) / local).max())  # keeps a NaN
    found = []
    for each, (_, state), fits in zip(sums, outputs, right, strict=True):
        if not fits:
            found.append((float("inf"), float("inf")))
            continue
        whole, worst = float(each[0] / size) ** 0.5, float(each[1]) ** 0.5
        if state is not None:
            off = float((state.double() - after).square().sum() / after.square().sum()) ** 0.5
            whole = whole if whole > off or whole != whole else off
        found.append((whole, worst))
    return found


def verdict(whole, worst, dtype="bfloat16"):
    """Why an output with these errors, rms(out - ref) / rms(ref), is refused, or None."""
    bound = RMS_BOUND_TF32 if dtype == "tf32" else RMS_BOUND[dtype]
    if whole < bound and worst < LOCAL * bound:
        return None
    return (f"wrong: rms error {whole:.1e} of all, {worst:.1e} of the worst chunk, "
            f"expected < {bound:.0e}, < {LOCAL * bound:.0e}")
