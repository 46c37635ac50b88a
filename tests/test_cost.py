"""flops and memory, against forms that count every operation as they do it."""

import numpy as np
import pytest
from support.variants import NORMALISED

import linattn
from linattn import reference
from linattn.testing import GATES, make_inputs


class Counted:
    """A number that counts what is done with it."""

    done = 0

    def __init__(self, x):
        self.x = float(x)

    def _count(self, x):
        Counted.done += 1
        return Counted(x)

    def __add__(self, other):
        return self._count(self.x + other.x)

    def __sub__(self, other):
        return self._count(self.x - other.x)

    def __mul__(self, other):
        return self._count(self.x * other.x)

    def __truediv__(self, other):
        return self._count(self.x / other.x)


counted = np.vectorize(Counted, otypes=[object])
plain = np.vectorize(lambda x: x.x, otypes=[float])


def dot(xs, ys, start=None):
    total = Counted(0) if start is None else start
    for x, y in zip(xs, ys, strict=True):
        total = total + x * y
    return total


def chunks(op, q, k, v, a, beta, normalize, scale, C):
    """o [T,HV,V] of docs/math.md's chunk form, with q and k [T,K] of one head and a [T,HV,K or 1],
    beta [T,HV] or None. Scores are computed once for all heads where they are the same."""
    T, HV, V = v.shape
    variant = linattn.VARIANTS[op]
    delta, by_key, decays = variant.rule == "delta", variant.decay == "key", variant.decay != "none"
    K = q.shape[1]
    S = [[[Counted(0)] * V for _ in range(K)] for _ in range(HV)]
    z = [[Counted(0)] * K for _ in range(HV)]
    o = np.empty(v.shape, object)
    for start in range(0, T, C):
        n = min(C, T - start)
        at = range(start, start + n)
        P = L = None
        for h in range(HV):
            fade = {}  # (i, j) -> a_i ... a_{j+1}, one factor or K of them
            keys = {}
            for j in range(n):
                if by_key:
                    keys[j, j] = list(k[at[j]])
                for i in range(j + 1, n):
                    if by_key:  # k_j fades on, by one more token
                        keys[i, j] = [
                            x * y for x, y in zip(keys[i - 1, j], a[at[i], h], strict=True)
                        ]
                    elif decays and i == j + 1:
                        fade[i, j] = a[at[i], h, 0] * Counted(1)
                    elif decays:
                        fade[i, j] = fade[i - 1, j] * a[at[i], h, 0]
            if by_key or h == 0:
                key = (lambda i, j: keys[i, j]) if by_key else (lambda i, j: k[at[j]])  # noqa: B023
                P = {(i, j): dot(q[at[i]], key(i, j)) for i in range(n) for j in range(i + 1)}
                if delta:
                    L = {(i, j): dot(k[at[i]], key(i, j)) for i in range(n) for j in range(i)}
            P_h, L_h = dict(P), dict(L) if delta else None
            for pair, by in fade.items():
                P_h[pair] = P_h[pair] * by
                if delta:
                    L_h[pair] = L_h[pair] * by
            e = None
            if decays:
                e = [list(a[at[0], h])]
                e[0] = [x * Counted(1) for x in e[0]]
                for i in range(1, n):
                    e.append([x * y for x, y in zip(e[-1], a[at[i], h], strict=True)])

            def faded(x, by):
                by = by if len(by) == K else list(by) * K
                return [x_i * y for x_i, y in zip(x, by, strict=True)]

            q_e = [faded(q[at[i]], e[i]) if decays else q[at[i]] for i in range(n)]
            U = [v[at[i], h] for i in range(n)]
            if delta:
                k_e = [faded(k[at[i]], e[i]) if decays else k[at[i]] for i in range(n)]
                U = []
                for i in range(n):
                    p = [dot(k_e[i], [S[h][c][d] for c in range(K)]) for d in range(V)]
                    b = beta[at[i], h]
                    row = [b * (v[at[i], h, d] - p[d]) for d in range(V)]
                    for j in range(i):
                        L_ij = b * L_h[i, j]
                        row = [x - L_ij * u for x, u in zip(row, U[j], strict=True)]
                    U.append(row)
            for i in range(n):
                den = None
                if normalize:
                    den = dot(q_e[i], z[h])
                    for j in range(i + 1):
                        den = den + P_h[i, j]
                    den = scale * den
                for d in range(V):
                    num = dot(q_e[i], [S[h][c][d] for c in range(K)])
                    for j in range(i + 1):
                        num = num + P_h[i, j] * U[j][d]
                    num = scale * num
                    o[at[i], h, d] = num / den if normalize else num
            if decays:
                S[h] = [[x * e[-1][c % len(e[-1])] for x in S[h][c]] for c in range(K)]
            for j in range(n):
                k_end = k[at[j]]
                if by_key:
                    k_end = keys[n - 1, j]
                    Counted.done += K * (j < n - 1)  # the form computes them, here they are at hand
                elif decays and j < n - 1:
                    k_end = faded(k[at[j]], [fade[n - 1, j]])
                for c in range(K):
                    S[h][c] = [x + k_end[c] * u for x, u in zip(S[h][c], U[j], strict=True)]
                if normalize:
                    z[h] = [x + y for x, y in zip(z[h], k[at[j]], strict=True)]
    return o


def problem(op, T, HV=1):
    x = make_inputs(op, np.random.default_rng(0), B=1, T=T, H=1, HV=HV, K=3, V=2)
    if op in NORMALISED:
        x["q"], x["k"] = abs(x["q"]), abs(x["k"])
    return x


def decays(op, x, T, HV):
    if "slopes" in x or "gamma" in x:
        a = np.exp(-x["slopes"]) if "slopes" in x else x["gamma"]
        return np.broadcast_to(a[None, :, None], (T, HV, 1))
    if "g" not in x:
        return np.ones((T, HV, 1))
    a = np.exp(x["g"][0])
    return a if a.ndim == 3 else a[..., None]


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize(("T", "C", "HV"), [(7, 3, 1), (5, 5, 2), (4, 1, 1)])
def test_chunks_count(op, T, C, HV):
    x = problem(op, T, HV)
    normalize = op in NORMALISED
    a = counted(decays(op, x, T, HV))
    beta = counted(x["beta"][0]) if "beta" in x else None
    q, k, v = counted(x["q"][0, :, 0]), counted(x["k"][0, :, 0]), counted(x["v"][0])
    Counted.done = 0
    o = chunks(op, q, k, v, a, beta, normalize, Counted(3**-0.5), C)
    done = Counted.done
    how = {"feature_map": "identity", "normalize": "clamp"} if normalize else {}
    expected, _ = getattr(reference, op)(**x, **how)
    np.testing.assert_allclose(plain(o), expected[0], rtol=1e-12, atol=1e-13)
    assert linattn.flops(op, T, 3, 2, HV=HV, chunk_size=C) == done
    assert linattn.flops(op, T, 3, 2, HV=HV, chunk_size=C, B=3) == 3 * done
    if C == T:
        assert linattn.flops(op, T, 3, 2, HV=HV, mode="parallel") == done


@pytest.mark.parametrize("op", GATES)
def test_the_recurrence_counts(op):
    """The recurrence of docs/math.md, with numbers that count."""
    T = 4
    x = problem(op, T)
    a = counted(decays(op, x, T, 1))[:, 0]
    variant = linattn.VARIANTS[op]
    S = [[Counted(0)] * 2 for _ in range(3)]
    z = [Counted(0)] * 3
    scale, normalize = Counted(3**-0.5), op in NORMALISED
    q, k, v = counted(x["q"][0, :, 0]), counted(x["k"][0, :, 0]), counted(x["v"][0, :, 0])
    beta = counted(x["beta"][0, :, 0]) if "beta" in x else None
    o = np.empty((T, 2), object)
    Counted.done = 0
    for t in range(T):
        if variant.decay != "none":
            S = [[a[t, c % a.shape[1]] * y for y in S[c]] for c in range(3)]
        u = v[t]
        if beta is not None:
            p = [dot(k[t], [S[c][d] for c in range(3)]) for d in range(2)]
            u = [beta[t] * (v[t, d] - p[d]) for d in range(2)]
        S = [[S[c][d] + k[t, c] * u[d] for d in range(2)] for c in range(3)]
        num = [scale * dot(q[t], [S[c][d] for c in range(3)]) for d in range(2)]
        if normalize:
            z = [z[c] + k[t, c] for c in range(3)]
            den = scale * dot(q[t], z)
            num = [y / den for y in num]
        o[t] = num
    done = Counted.done
    how = {"feature_map": "identity", "normalize": "clamp"} if normalize else {}
    expected, _ = getattr(reference, op)(**x, **how)
    np.testing.assert_allclose(plain(o), expected[0, :, 0], rtol=1e-12, atol=1e-13)
    assert linattn.flops(op, T, 3, 2, mode="recurrent") == done
    assert linattn.flops(op, 1, 3, 2, mode="recurrent") * T == done


def test_softmax_counts():
    T, K, V = 4, 3, 2
    rng = np.random.default_rng(0)
    q, k, v = (counted(rng.standard_normal((T, n))) for n in (K, K, V))
    Counted.done = 0
    for i in range(T):
        scores = [Counted(0.5) * dot(q[i], k[j]) for j in range(i + 1)]
        total = Counted(0)
        for s in scores:
            total = total + s
        weights = [s / total for s in scores]
        for d in range(V):
            dot(weights, [v[j, d] for j in range(i + 1)])
    assert linattn.flops("softmax", T, K, V) == Counted.done


def test_the_crossing():
    """Softmax costs what the recurrence costs where T is about twice K: T/2 tokens are seen."""
    K = 64
    cheaper = [
        linattn.flops("linear_attention", T, K, K, mode="recurrent", normalize=False)
        < linattn.flops("softmax", T, K, K)
        for T in range(1, 4 * K)
    ]
    assert cheaper.index(True) in range(int(1.9 * K), int(2.1 * K)) and all(cheaper[2 * K :])


@pytest.mark.parametrize("op", GATES)
def test_memory_is_that_of_the_arrays(op):
    x = make_inputs(op, np.random.default_rng(0), B=2, T=6, H=2, HV=4, K=3, V=5, dtype=np.float32)
    o, state = getattr(linattn, op)(**x, output_final_state=True)
    of_state = sum(a.nbytes for a in (state if isinstance(state, tuple) else (state,)))
    got = linattn.memory(op, 6, 3, 5, B=2, H=2, HV=4)
    assert got.arrays == o.nbytes + sum(a.nbytes for a in x.values())
    assert got.kept == of_state and got.weights == 2 * 4 * 6 * 6 * 4
    softmax = linattn.memory("softmax", 6, 3, 5, B=2, H=2, HV=4, itemsize=2)
    assert softmax.kept == (x["k"].nbytes + x["v"].nbytes) // 2


@pytest.mark.parametrize(
    ("call", "bad", "error", "text"),
    [
        ("flops", {"op": "attention"}, ValueError, "op: expected one of linear_attention, "),
        ("flops", {"T": 1.5}, TypeError, "T: expected an int, got float"),
        ("flops", {"K": -1}, ValueError, "K: expected a size >= 0, got -1"),
        ("flops", {"chunk_size": 0}, ValueError, "chunk_size: expected a size >= 1, got 0"),
        (
            "flops",
            {"mode": "step"},
            ValueError,
            "mode: expected 'chunk', 'recurrent' or 'parallel'",
        ),
        ("flops", {"H": 2, "HV": 3}, ValueError, "HV: expected a multiple of H = 2, got 3"),
        ("memory", {"op": 3}, ValueError, "op: expected one of linear_attention, "),
        ("memory", {"itemsize": 0}, ValueError, "itemsize: expected a size >= 1, got 0"),
    ],
)
def test_refuses(call, bad, error, text):
    with pytest.raises(error) as caught:
        getattr(linattn, call)(**{"op": "gla", "T": 4, "K": 3, "V": 2} | bad)
    assert str(caught.value).startswith(text)
