"""flops and memory, against forms that count every operation as they do it."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.counted import Counted, counted, dot, plain, product, zeros
from support.variants import NORMALISED, PREDICTS, ops_with

import linattn
from linattn import cost, reference
from linattn.testing import GATES, make_inputs

# The ops of section 2 of docs/math.md; test_cost_rules.py has the others.
FOUR_LINES = tuple(op for op in GATES if op in ops_with(rule="additive") + PREDICTS)


class Chunk:
    """Sections 3 and 4 of docs/math.md for n tokens of one head. q, k [n,K], v [n,V], a [n,K or 1],
    beta [n] or None. `bare` has the products of q and k that heads share, for the first to make."""

    def __init__(self, variant, q, k, v, a, beta, S, z, scale, bare):
        self.q, self.k, self.v, self.a, self.beta = q, k, v, a, beta
        self.S, self.z, self.scale = S, z, scale
        self.n = n = len(q)
        self.by_key, self.decays = variant.decay == "key", variant.decay != "none"
        self.delta, self.normalize = beta is not None, z is not None
        self.at_or_before = [(i, j) for i in range(n) for j in range(i + 1)]
        self.before = [(i, j) for i in range(n) for j in range(i)]
        self.e, self.G, self.rho = [], {}, {}
        self.fade()
        if self.by_key:
            bare = {}
        if not bare:
            seen = self.rho if self.by_key else {(i, j): k[j] for i, j in self.at_or_before}
            bare["qk"] = {(i, j): dot(q[i], seen[i, j]) for i, j in self.at_or_before}
            if self.delta:
                bare["kk"] = {(i, j): dot(k[i], seen[i, j]) for i, j in self.before}
        self.P, self.L = dict(bare["qk"]), dict(bare.get("kk", {}))
        self.bare = bare
        for pair, by in self.G.items():
            self.P[pair] = self.P[pair] * by
            if self.delta:
                self.L[pair] = self.L[pair] * by
        self.q_hat, self.k_hat = q, k
        if self.decays:
            self.q_hat = q * self.e
            if self.delta:
                self.k_hat = k * self.e
        self.k_tilde = k.copy()
        for j in range(n - 1):
            if self.by_key:
                self.k_tilde[j] = self.rho[n - 1, j]
            elif self.decays:
                self.k_tilde[j] = k[j] * self.G[n - 1, j]
        self.solve()
        if self.normalize:
            self.den = [dot(self.q_hat[i], z) for i in range(n)]
            for i, j in self.at_or_before:
                self.den[i] = self.den[i] + self.P[i, j]
            self.den = [scale * x for x in self.den]

    def fade(self):
        one = counted(np.ones(self.a.shape[1]))
        for i in range(self.n if self.decays else 0):
            self.e.append(self.a[i] * (self.e[-1] if i else one))
            for j in range(i):
                if not self.by_key:
                    self.G[i, j] = self.a[i, 0] * (self.G[i - 1, j] if j < i - 1 else one[0])
        if self.by_key:
            self.fade_keys()

    def fade_keys(self):
        for j in range(self.n):
            self.rho[j, j] = self.k[j]
            for i in range(j + 1, self.n):
                self.rho[i, j] = self.a[i] * self.rho[i - 1, j]

    def solve(self):
        self.U = self.v
        if not self.delta:
            return
        self.E, self.U = zeros(*self.v.shape), zeros(*self.v.shape)
        for i in range(self.n):
            p = product(self.k_hat[i][None], self.S)[0]
            for j in range(i):
                p = p + self.L[i, j] * self.U[j]
            self.E[i] = self.v[i] - p
            self.U[i] = self.beta[i] * self.E[i]

    def read(self):
        num = product(self.q_hat, self.S)
        for i, j in self.at_or_before:
            num[i] = num[i] + self.P[i, j] * self.U[j]
        o = self.scale * num
        return o / np.array(self.den, object)[:, None] if self.normalize else o

    def carry(self):
        S, z = self.S, self.z
        if self.decays:
            S = self.e[-1][:, None] * S if self.by_key else self.e[-1][0] * S
        S = product(self.k_tilde.T, self.U, S)
        if self.normalize:
            for key in self.k:
                z = z + key
        return S, z

    def adjoint(self, do, dS, dz):
        """Section 6: dq, dk, dv, da, dbeta, and dS and dz of the state before."""
        n, q, a, (K, V) = self.n, self.q, self.a, self.S.shape
        dO = self.scale * do
        if self.normalize:
            dO = dO / np.array(self.den, object)[:, None]
        # carry and read
        dU = product(self.k_tilde, dS)
        for i, j in self.at_or_before:
            dU[j] = dU[j] + self.P[i, j] * dO[i]
        dP = {(i, j): dot(dO[i], self.U[j]) for i, j in self.at_or_before}
        dk_tilde = product(self.U, dS.T)
        de = zeros(self.a.shape[1])
        if self.decays:
            if self.by_key:
                de = np.array([dot(self.S[x], dS[x]) for x in range(K)], object)
            else:
                de = np.array([dot(self.S.ravel(), dS.ravel())], object)
        # solve
        dL, dbeta, dv = {}, None, dU
        if self.delta:
            dE, dbeta = zeros(n, V), zeros(n)
            for j in reversed(range(n)):
                for i in range(j + 1, n):
                    dU[j] = dU[j] + self.L[i, j] * -dE[i]
                dE[j] = self.beta[j] * dU[j]
                dbeta[j] = dot(dU[j], self.E[j])
            dL = {(i, j): dot(-dE[i], self.U[j]) for i, j in self.before}
            dv = dE
        # X
        dq_hat = product(dO, self.S.T)
        dk_hat = product(-dE, self.S.T) if self.delta else None
        if self.decays:
            dS = self.e[-1][:, None] * dS if self.by_key else self.e[-1][0] * dS
        dS = product(self.q_hat.T, dO, dS)
        if self.delta:
            dS = product(self.k_hat.T, -dE, dS)
        # the normaliser
        dk = zeros(n, K)
        if self.normalize:
            d_den = zeros(n)
            dk = np.array([dz] * n, object)
            for i in range(n):
                total = dot(q[i], dq_hat[i])
                for j in range(i + 1):
                    total = total + self.P[i, j] * dP[i, j]
                d_den[i] = self.scale * -total / self.den[i]
                dq_hat[i] = dq_hat[i] + d_den[i] * self.z
                for j in range(i + 1):
                    dP[i, j] = dP[i, j] + d_den[i]
            for i in range(n):
                dz = dz + d_den[i] * q[i]
        dq, da = zeros(n, K), zeros(*a.shape)
        scores = self.scores_of_keys if self.by_key else self.scores_of_tokens
        scores(dP, dL, dq, dk, da, dq_hat, dk_hat, dk_tilde, de)
        return dq, dk, dv, da, dbeta, dS, dz

    def scores_of_tokens(self, dP, dL, dq, dk, da, dq_hat, dk_hat, dk_tilde, de):
        n, q, k, a = self.n, self.q, self.k, self.a
        dG = {}
        for pair, by in self.G.items():
            dG[pair] = dP[pair] * self.bare["qk"][pair]
            dP[pair] = by * dP[pair]
            if self.delta:
                dG[pair] = dG[pair] + dL[pair] * self.bare["kk"][pair]
                dL[pair] = by * dL[pair]
        for i, j in self.at_or_before:
            dq[i] = dq[i] + dP[i, j] * k[j]
            dk[j] = dk[j] + dP[i, j] * q[i]
        for i, j in dL:
            dk[i] = dk[i] + dL[i, j] * k[j]
            dk[j] = dk[j] + dL[i, j] * k[i]
        for i in range(n):
            last = i == n - 1 or not self.decays
            dk[i] = dk[i] + (dk_tilde[i] if last else self.G[n - 1, i] * dk_tilde[i])
            dq[i] = dq[i] + (self.e[i] * dq_hat[i] if self.decays else dq_hat[i])
            if self.delta:
                dk[i] = dk[i] + (self.e[i] * dk_hat[i] if self.decays else dk_hat[i])
            if not last:
                dG[n - 1, i] = dot(k[i], dk_tilde[i], dG[n - 1, i])
        one = Counted(1)
        for i in reversed(range(n if self.decays else 0)):
            de[0] = dot(q[i], dq_hat[i], de[0])
            if self.delta:
                de[0] = dot(k[i], dk_hat[i], de[0])
            da[i] = de * (self.e[i - 1] if i else one)
            for j in range(i):
                da[i] = da[i] + dG[i, j] * (self.G[i - 1, j] if j < i - 1 else one)
                if j < i - 1:
                    dG[i - 1, j] = dG[i - 1, j] + a[i, 0] * dG[i, j]
            if i:
                de = zeros(1) + a[i] * de

    def scores_of_keys(self, dP, dL, dq, dk, da, dq_hat, dk_hat, dk_tilde, de):
        n, q, k, a = self.n, self.q, self.k, self.a
        one = Counted(1)
        for i in reversed(range(n)):
            de = de + q[i] * dq_hat[i]
            dq[i] = dq[i] + self.e[i] * dq_hat[i]
            if self.delta:
                de = de + k[i] * dk_hat[i]
                dk[i] = dk[i] + self.e[i] * dk_hat[i]
            da[i] = de * (self.e[i - 1] if i else one)
            if i:
                de = zeros(len(de)) + a[i] * de
        self.fade_keys()
        for j in range(n):
            d = dk_tilde[j]
            for i in range(n - 1, j, -1):
                d = d + dP[i, j] * q[i]
                dq[i] = dq[i] + dP[i, j] * self.rho[i, j]
                if self.delta:
                    d = d + dL[i, j] * k[i]
                    dk[i] = dk[i] + dL[i, j] * self.rho[i, j]
                da[i] = da[i] + d * self.rho[i - 1, j]
                d = a[i] * d
            dk[j] = dk[j] + (d + dP[j, j] * q[j])
            dq[j] = dq[j] + dP[j, j] * k[j]


SCALE, K, V = 3**-0.5, 3, 2


class Problem:
    """A batch row of an op on numbers that count, with one head of q and k; and what it expects."""

    def __init__(self, op, T, HV=1):
        rng = np.random.default_rng(0)
        self.op, self.T, self.HV, self.variant = op, T, HV, linattn.VARIANTS[op]
        self.normalize = op in NORMALISED
        x = make_inputs(op, rng, T=T, HV=HV, K=K, V=V, initial_state=True)
        if self.normalize:
            x["q"], x["k"] = abs(x["q"]), abs(x["k"])
            x["initial_state"] = tuple(map(abs, x["initial_state"]))
        if "g" in x:
            x["alpha"] = np.exp(x.pop("g"))  # its gradient is that of the decay
        self.do, self.dS = rng.standard_normal((1, T, HV, V)), rng.standard_normal((1, HV, K, V))
        self.dz = rng.standard_normal((1, HV, K)) if self.normalize else None
        how = {"feature_map": "identity", "normalize": "clamp"} if self.normalize else {}
        self.o, self.final = getattr(reference, op)(**x, **how)
        d_final = (self.dS, self.dz) if self.normalize else self.dS
        self.gradients = reference.backward(op, self.do, **x, **how, d_final_state=d_final)
        a = np.ones((T, HV, 1))
        if self.variant.decay == "head":
            a = a * (x["gamma"] if "gamma" in x else np.exp(-x["slopes"]))[:, None]
        elif self.variant.decay != "none":
            a = x["alpha"].reshape(T, HV, -1)
        self.a, self.q, self.k, self.v = a, x["q"][0, :, 0], x["k"][0, :, 0], x["v"][0]
        self.beta = x["beta"][0] if "beta" in x else None
        S = x["initial_state"]
        self.S, self.z = (S[0][0], S[1][0]) if self.normalize else (S[0], None)

    def counted(self):
        """q, k, v, a, beta, S, z, scale."""
        parts = (self.q, self.k, self.v, self.a, self.beta, self.S, self.z)
        return *(None if x is None else counted(x) for x in parts), Counted(SCALE)

    def check_forward(self, o, S, z):
        same(o, self.o[0])
        final = self.final if self.normalize else (self.final, None)
        same(S, final[0][0])
        if z is not None:
            same(z, final[1][0])

    def check_backward(self, dq, dk, dv, da, dbeta, dS, dz):
        """dq, dk [T,K], the others by head."""
        want = self.gradients
        same(dq, want.dq[0, :, 0])
        same(dk, want.dk[0, :, 0])
        same(dv, want.dv[0])
        if self.variant.decay == "head":
            sign = -self.a[0, :, 0] if self.op == "lightning_attention" else 1
            np.testing.assert_allclose(sign * plain(da), want.dg, rtol=1e-10, atol=1e-12)
        elif self.variant.decay != "none":
            same(da.reshape(want.dg[0].shape), want.dg[0])
        if self.beta is not None:
            same(dbeta, want.dbeta[0])
        d_first = want.d_initial_state if self.normalize else (want.d_initial_state, None)
        same(dS, d_first[0][0])
        if dz is not None:
            same(dz, d_first[1][0])


def same(got, want):
    np.testing.assert_allclose(plain(np.array(got, object)), want, rtol=1e-10, atol=1e-12)


def chunks_of(p, C):
    """The chunks of each head in their order, and S and z behind the last unless it is kept."""
    q, k, v, a, beta, S, z, scale = p.counted()
    starts = range(0, p.T, C)
    bare = [{} for _ in starts]
    for h in range(p.HV):
        state, made = (S[h], None if z is None else z[h]), []
        for start, shared in zip(starts, bare, strict=True):
            at = slice(start, start + C)
            if made:
                state = made[-1].carry()
            made.append(
                Chunk(
                    p.variant,
                    q[at],
                    k[at],
                    v[at, h],
                    a[at, h],
                    None if beta is None else beta[at, h],
                    *state,
                    scale,
                    shared,
                )
            )
        yield made


@pytest.mark.parametrize("op", FOUR_LINES)
@pytest.mark.parametrize(("T", "C", "HV"), [(7, 3, 1), (5, 5, 2), (4, 1, 1)])
def test_chunks_count(op, T, C, HV):
    p = Problem(op, T, HV)
    Counted.done = 0
    o, finals = [], []
    for made in chunks_of(p, C):
        o.append(np.concatenate([chunk.read() for chunk in made]))
        finals.append(made[-1].carry())
    done = Counted.done
    S, z = zip(*finals, strict=True)
    p.check_forward(np.stack(o, 1), S, z if p.normalize else None)
    assert linattn.flops(op, T, K, V, HV=HV, chunk_size=C) == done
    assert linattn.flops(op, T, K, V, HV=HV, chunk_size=C, B=3) == 3 * done
    if C == T:
        assert linattn.flops(op, T, K, V, HV=HV, mode="parallel") == done


def summed(by_head):
    """The sum over heads."""
    total = by_head[0]
    for x in by_head[1:]:
        total = total + x
    return total


def gate_gradient(p, da):
    """da [T,HV,..] as the gate is given: summed over the tokens for a constant."""
    if p.variant.decay != "head":
        return da
    total = zeros(p.HV)
    for t in range(p.T):
        total = total + da[t, :, 0]
    return total


@pytest.mark.parametrize("op", FOUR_LINES)
@pytest.mark.parametrize(("T", "C", "HV"), [(7, 3, 1), (5, 5, 2), (6, 3, 3), (4, 1, 1), (2, 2, 1)])
def test_chunks_count_backward(op, T, C, HV):
    p = Problem(op, T, HV)
    do, dS, dz = counted(p.do[0]), counted(p.dS[0]), counted(p.dz[0]) if p.normalize else None
    Counted.done = 0
    rows, first = [], []
    for h, made in enumerate(chunks_of(p, C)):
        state, of_head = (dS[h], None if dz is None else dz[h]), []
        for i in reversed(range(len(made))):
            *found, d_S, d_z = made[i].adjoint(do[i * C : (i + 1) * C, h], *state)
            state = d_S, d_z
            of_head.insert(0, found)
        first.append(state)
        rows.append(
            [None if x[0] is None else np.concatenate(x) for x in zip(*of_head, strict=True)]
        )
    dq, dk, dv, da, dbeta = zip(*rows, strict=True)
    dq, dk, da = summed(dq), summed(dk), gate_gradient(p, np.stack(da, 1))
    done = Counted.done
    dbeta = None if p.beta is None else np.stack(dbeta, 1)
    S, z = zip(*first, strict=True)
    p.check_backward(dq, dk, np.stack(dv, 1), da, dbeta, S, z if p.normalize else None)
    how = {"HV": HV, "chunk_size": C}
    assert linattn.flops(op, T, K, V, passes="backward", **how) == done
    assert linattn.flops(op, T, K, V, passes="backward", B=3, **how) == 3 * done
    how_twice = how | {"H": 2, "HV": 2 * HV}
    assert linattn.flops(op, T, K, V, passes="backward", **how_twice) == 2 * done
    forward = linattn.flops(op, T, K, V, **how)
    assert linattn.flops(op, T, K, V, passes="both", **how) == forward + done
    if C == T:
        assert linattn.flops(op, T, K, V, HV=HV, mode="parallel", passes="backward") == done


def tokens_of(p, h):
    """Section 2 of docs/math.md for a head: of each token its S before, after its decay, and after
    its write; its error, its write, z, and the denominator."""
    q, k, v, a, beta, S, z, scale = p.counted()
    S, z = S[h], None if z is None else z[h]
    for t in range(p.T):
        before, den, E = S, None, None
        if p.variant.decay != "none":
            S = a[t, h][:, None] * S
        decayed, U = S, v[t, h]
        if beta is not None:
            E = v[t, h] - product(k[t][None], S)[0]
            U = beta[t, h] * E
        S = S + k[t][:, None] * U
        if p.normalize:
            z = z + k[t]
            den = scale * dot(q[t], z)
        yield before, decayed, S, E, U, z, den


@pytest.mark.parametrize("op", FOUR_LINES)
def test_the_recurrence_counts(op):
    p = Problem(op, T=4)
    q, scale = counted(p.q), Counted(SCALE)
    Counted.done, o = 0, []
    kept = list(tokens_of(p, 0))
    for t, (_, _, S, *_, den) in enumerate(kept):
        num = product(q[t][None], S) * scale
        o.append(num / den if p.normalize else num)
    done = Counted.done
    *_, S, _, _, z, _ = kept[-1]
    p.check_forward(o, [S], [z] if p.normalize else None)
    assert linattn.flops(op, 4, K, V, mode="recurrent") == done
    assert linattn.flops(op, 1, K, V, mode="recurrent") * 4 == done


@pytest.mark.parametrize("op", FOUR_LINES)
@pytest.mark.parametrize("HV", [1, 2])
def test_the_recurrence_counts_backward(op, HV):
    """Section 5 of docs/math.md, line by line."""
    p = Problem(op, 4, HV)
    q, k, _, a, beta, _, _, scale = p.counted()
    do, d_S, d_z = counted(p.do[0]), counted(p.dS[0]), counted(p.dz[0]) if p.normalize else None
    Counted.done, rows, first = 0, [], []
    for h in range(HV):
        kept = list(tokens_of(p, h))
        dS, dz = d_S[h], None if d_z is None else d_z[h]
        dq, dk, dv = np.empty((4, K), object), np.empty((4, K), object), np.empty((4, V), object)
        da, dbeta = np.empty(a[:, h].shape, object), np.empty(4, object)
        for t in reversed(range(4)):
            before, decayed, written, E, U, z, den = kept[t]
            dnum = do[t, h] * scale
            if p.normalize:
                dnum = dnum / den
            dq[t] = product(written, dnum[:, None])[:, 0]
            if p.normalize:
                d_den = scale * -dot(q[t], dq[t]) / den
                dq[t] = dq[t] + d_den * z
                dz = dz + d_den * q[t]
            dS = dS + q[t][:, None] * dnum
            dk[t] = product(dS, U[:, None], dz[:, None] if p.normalize else None)[:, 0]
            dU = product(k[t][None], dS)[0]
            dv[t] = dU
            if beta is not None:
                dbeta[t] = dot(E, dU)
                dv[t] = beta[t, h] * dU
                dk[t] = product(decayed, -dv[t][:, None], dk[t][:, None])[:, 0]
                dS = dS + k[t][:, None] * -dv[t]
            if p.variant.decay == "key":
                da[t] = [dot(before[x], dS[x]) for x in range(K)]
            elif p.variant.decay != "none":
                da[t] = dot(before.ravel(), dS.ravel())
            if p.variant.decay != "none":
                dS = a[t, h][:, None] * dS
        rows.append((dq, dk, dv, da, dbeta))
        first.append((dS, dz))
    dq, dk, dv, da, dbeta = zip(*rows, strict=True)
    dq, dk = summed(dq), summed(dk)
    if p.variant.decay != "none":
        da = gate_gradient(p, np.stack(da, 1))
    done = Counted.done
    S, z = zip(*first, strict=True)
    p.check_backward(dq, dk, np.stack(dv, 1), da, np.stack(dbeta, 1), S, z if p.normalize else None)
    assert linattn.flops(op, 4, K, V, HV=HV, mode="recurrent", passes="backward") == done
    forward = linattn.flops(op, 4, K, V, HV=HV, mode="recurrent")
    both = linattn.flops(op, 4, K, V, HV=HV, mode="recurrent", passes="both")
    assert both == forward + done


def test_softmax_counts():
    T, rng = 4, np.random.default_rng(0)
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


@pytest.mark.parametrize("HV", [1, 2])
def test_softmax_counts_backward(HV):
    """linattn.reference.softmax_attention_backward, of the lower triangle alone."""
    T, rng = 4, np.random.default_rng(0)
    given = [rng.standard_normal((T, n, d)) for n, d in ((HV, V), (1, K), (1, K), (HV, V))]
    do, q, k, v = map(counted, given)
    q, k, scale = q[:, 0], k[:, 0], Counted(SCALE)
    Counted.done = 0
    dq, dk, dv = zeros(T, K), zeros(T, K), zeros(T, HV, V)
    for i in range(T):
        scores = [Counted(np.exp((scale * dot(q[i], k[j])).x)) for j in range(i + 1)]
        total = Counted(0)
        for x in scores:
            total = total + x
        A = [x / total for x in scores]
        dA = []
        for j in range(i + 1):
            for h in range(HV):
                dv[j, h] = dv[j, h] + A[j] * do[i, h]
            dA.append(summed([dot(do[i, h], v[j, h]) for h in range(HV)]))
        mean = dot(A, dA)
        for j in range(i + 1):
            ds = A[j] * (dA[j] - mean)
            dq[i] = dq[i] + ds * k[j]
            dk[j] = dk[j] + ds * q[i]
    dq, dk = scale * dq, scale * dk
    done = Counted.done
    want = reference.softmax_attention_backward(*(x[None] for x in given))
    same(dq, want.dq[0, :, 0])
    same(dk, want.dk[0, :, 0])
    same(dv, want.dv[0])
    assert linattn.flops("softmax", T, K, V, HV=HV, passes="backward") == done


def test_nothing_costs_nothing():
    for op in (*linattn.OPS, "softmax"):
        for mode in ("chunk", "recurrent", "parallel"):
            assert linattn.flops(op, 0, K, V, mode=mode, passes="both") == 0


def test_the_default_chunk_is_the_cores():
    source = Path(__file__).parents[1] / "csrc" / "cpu" / "instance.h"
    if not source.exists():
        pytest.skip("csrc/cpu/instance.h: not in a checkout")
    (tokens,) = re.findall(r"enum \{ CHUNK = (\d+) \};", source.read_text())
    assert cost.CHUNK == int(tokens)
    expected = linattn.flops("kda", 100, K, V, chunk_size=int(tokens), passes="both")
    assert linattn.flops("kda", 100, K, V, passes="both") == expected


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
        (
            "flops",
            {"passes": "step"},
            ValueError,
            "passes: expected 'forward', 'backward' or 'both', got 'step'",
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
