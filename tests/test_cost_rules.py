"""flops of the rules of section 16 of docs/math.md, against forms that count what they do."""

import numpy as np
import pytest
from support.compare import leaves
from support.counted import Counted, counted, dot, plain, product, zeros
from support.variants import PAIR_DECAY, ops_with

import linattn
from linattn import reference
from linattn.testing import make_inputs, make_output_gradients

K, V = 3, 2
SCALE = 3**-0.5
ONE = Counted(1)
DPLR, BONUS = ops_with(rule="dplr"), ops_with(rule="bonus")
OPS = DPLR + BONUS + PAIR_DECAY


def same(got, want):
    np.testing.assert_allclose(plain(np.array(got, object)), want, rtol=1e-10, atol=1e-12)


def outer(x, y, start):
    """start + x y'."""
    return start + x[:, None] * y


def times(S, x):
    """S x: a number for each row."""
    return np.array([dot(row, x) for row in S], object)


def back(x, S):
    """S' x."""
    return times(S.T, x)


class Problem:
    """One row of the batch, one head of keys, HV of values, as numbers that count."""

    def __init__(self, op, T, HV):
        rng = np.random.default_rng(0)
        self.op, self.T, self.HV = op, T, HV
        x = make_inputs(op, rng, T=T, HV=HV, K=K, V=V, initial_state=True)
        x["alpha"] = np.exp(x.pop("g"))  # its gradient is that of the decay
        self.d = make_output_gradients(op, rng, x)
        x["scale"] = SCALE
        self.o, self.final = getattr(reference, op)(**x)
        self.gradients = reference.backward(op, **self.d, **x)
        self.keys = {n: counted(x[n][0, :, 0]) for n in "qkxy" if n in x}
        if "bonus" in x:
            self.keys["bonus"] = counted(x["bonus"][0])
        self.gates = {n: counted(x[n][0]) for n in ("v", "alpha", "beta", "eta") if n in x}
        self.states = [counted(S[0]) for S in leaves(x["initial_state"])]
        self.do = counted(self.d["do"][0])
        self.d_states = [counted(S[0]) for S in leaves(self.d["d_final_state"])]
        self.scale = Counted(SCALE)

    def head(self, h, rows=slice(None)):
        """The arrays of a value head, of some tokens."""
        keys = {n: x if n == "bonus" else x[rows] for n, x in self.keys.items()}
        return keys | {n: x[rows, h] for n, x in self.gates.items()}

    def check_forward(self, o, finals):
        same(np.stack(o, 1), self.o[0])
        for i, want in enumerate(leaves(self.final)):
            same(np.stack([states[i] for states in finals]), want[0])

    def check_backward(self, by_head, firsts):
        """by_head: a dict of gradients for each head; those of keys are summed here."""
        total = dict(by_head[0])
        for grads in by_head[1:]:
            for n in self.keys:
                total[n] = total[n] + grads[n] if n != "bonus" else total[n]
        done = Counted.done
        want = self.gradients
        for n in self.keys:
            found = total[n] if n != "bonus" else sum_plain(by_head)
            of = getattr(want, f"d{n}")[0] if n == "bonus" else getattr(want, f"d{n}")[0, :, 0]
            np.testing.assert_allclose(plain(found), of, rtol=1e-9, atol=1e-11)
        for n in self.gates:
            of = getattr(want, {"alpha": "dg"}.get(n, f"d{n}"))
            same(np.stack([grads[n] for grads in by_head], 1), of[0])
        for i, of in enumerate(leaves(want.d_initial_state)):
            same(np.stack([states[i] for states in firsts]), of[0])
        return done


def sum_plain(by_head):
    """The sum over tokens goes on from head to head: no operation more."""
    return counted(sum(plain(grads["bonus"]) for grads in by_head))


# ---- token by token ----


def dplr_token(x, t, S, scale):
    p = back(x["x"][t], S)
    S = outer(x["k"][t], x["v"][t], x["alpha"][t][:, None] * S)
    return [S - x["y"][t][:, None] * p], p


def bonus_token(x, t, S, scale):
    return [outer(x["k"][t], x["v"][t], x["alpha"][t][:, None] * S)], None


def pair_token(x, t, M, Y, scale):
    error = x["v"][t] - back(x["k"][t], M)
    Y = outer(x["k"][t], x["beta"][t] * error, x["eta"][t] * Y)
    return [x["alpha"][t] * M + Y, Y], error


def token_read(op, x, t, before, after, scale):
    if op in BONUS:
        own = dot(x["q"][t], x["bonus"] * x["k"][t])
        return scale * (back(x["q"][t], before[0]) + own * x["v"][t])
    return scale * back(x["q"][t], after[0])


TOKEN = dict.fromkeys(DPLR, dplr_token) | dict.fromkeys(BONUS, bonus_token)
TOKEN |= dict.fromkeys(PAIR_DECAY, pair_token)


def walk(p, h):
    """The states before each token and after the last, and what a token has looked up."""
    states, kept = [p.states[i][h] for i in range(len(p.states))], []
    x = p.head(h)
    for t in range(p.T):
        after, look = TOKEN[p.op](x, t, *states, p.scale)
        kept.append((states, look))
        states = after
    return x, [*kept, (states, None)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("HV", [1, 2])
def test_the_recurrence_counts(op, HV):
    p = Problem(op, 4, HV)
    Counted.done, o, finals = 0, [], []
    for h in range(HV):
        x, kept = walk(p, h)
        reads = [token_read(op, x, t, kept[t][0], kept[t + 1][0], p.scale) for t in range(p.T)]
        o.append(np.array(reads, object))
        finals.append(kept[-1][0])
    done = Counted.done
    p.check_forward(o, finals)
    assert linattn.flops(op, 4, K, V, HV=HV, mode="recurrent") == done
    assert linattn.flops(op, 1, K, V, HV=HV, mode="recurrent") * 4 == done


def dplr_token_adjoint(x, t, S, after, p, dnum, dS, grads):
    (S,), (after,), (dS,) = S, after, dS
    grads["q"][t] = times(after, dnum)
    dS = outer(x["q"][t], dnum, dS)
    grads["k"][t], grads["v"][t] = times(dS, x["v"][t]), back(x["k"][t], dS)
    grads["y"][t], dp = -times(dS, p), -back(x["y"][t], dS)
    grads["alpha"][t] = [dot(S[i], dS[i]) for i in range(K)]
    dS = x["alpha"][t][:, None] * dS
    grads["x"][t] = times(S, dp)
    return [outer(x["x"][t], dp, dS)]


def bonus_token_adjoint(x, t, S, after, _, dnum, dS, grads):
    (S,), (dS,) = S, dS
    q, k, v = x["q"][t], x["k"][t], x["v"][t]
    dk, dv = times(dS, v), back(k, dS)
    grads["alpha"][t] = [dot(S[i], dS[i]) for i in range(K)]
    dS = x["alpha"][t][:, None] * dS
    dq, dS = times(S, dnum), outer(q, dnum, dS)
    faded = x["bonus"] * k
    grads["v"][t] = dv + dot(q, faded) * dnum
    down = dot(v, dnum)
    grads["q"][t], grads["k"][t] = dq + down * faded, dk + down * (x["bonus"] * q)
    grads["bonus"] = grads["bonus"] + down * (q * k)
    return [dS]


def pair_token_adjoint(x, t, before, after, error, dnum, d_states, grads):
    (M, Y), (dM, dY), k = before, d_states, x["k"][t]
    grads["q"][t], dM = times(after[0], dnum), outer(x["q"][t], dnum, dM)
    dY = dY + dM
    grads["alpha"][t], dM = dot(M.ravel(), dM.ravel()), x["alpha"][t] * dM
    # the value that was written is beta error, which the forward pass has made
    u = counted(plain(x["beta"][t] * error))
    Counted.done -= V
    dk, du = times(dY, u), back(k, dY)
    grads["eta"][t], dY = dot(Y.ravel(), dY.ravel()), x["eta"][t] * dY
    grads["beta"][t], dv = dot(error, du), x["beta"][t] * du
    grads["v"][t] = dv
    grads["k"][t] = product(M, -dv[:, None], dk[:, None])[:, 0]
    return [outer(k, -dv, dM), dY]


TOKEN_ADJOINT = dict.fromkeys(DPLR, dplr_token_adjoint) | dict.fromkeys(BONUS, bonus_token_adjoint)
TOKEN_ADJOINT |= dict.fromkeys(PAIR_DECAY, pair_token_adjoint)


def empty_gradients(x):
    return {n: zeros(*a.shape) for n, a in x.items()}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("HV", [1, 2])
def test_the_recurrence_counts_backward(op, HV):
    p = Problem(op, 4, HV)
    Counted.done, by_head, firsts = 0, [], []
    for h in range(HV):
        x, kept = walk(p, h)
        grads, d_states = empty_gradients(x), [dS[h] for dS in p.d_states]
        for t in reversed(range(p.T)):
            (states, look), dnum = kept[t], p.do[t, h] * p.scale
            d_states = TOKEN_ADJOINT[op](x, t, states, kept[t + 1][0], look, dnum, d_states, grads)
        by_head.append(grads)
        firsts.append(d_states)
    done = p.check_backward(by_head, firsts)
    assert linattn.flops(op, 4, K, V, HV=HV, mode="recurrent", passes="backward") == done


# ---- in chunks: the stages of section 16, each with its adjoint ----


class KeyChunk:
    """What the rules with a decay per key share: e, the keys faded on, and their adjoints."""

    def fade(self):
        self.e = []
        for i in range(self.n):
            self.e.append(self.x["alpha"][i] * (self.e[-1] if i else counted(np.ones(K))))
        self.before = [counted(np.ones(K)), *self.e[:-1]]

    def fade_keys(self, rows):
        rho = {}
        for j in range(self.n):
            rho[j, j] = rows[j]
            for i in range(j + 1, self.n):
                rho[i, j] = self.x["alpha"][i] * rho[i - 1, j]
        return rho

    def e_adjoint(self, de, of_i, of_before, dq, dx, da):
        """of_i, of_before: the rows that meet e_i and e_{i-1}, with their gradients."""
        for i in reversed(range(self.n)):
            for rows, d_hat in of_i:
                de = de + rows[i] * d_hat[i]
                dq[i] = dq[i] + self.e[i] * d_hat[i]
            da[i] = de * (self.e[i - 1] if i else counted(np.ones(K)))
            for _, d_hat in of_before:
                dx[i] = dx[i] + self.before[i] * d_hat[i]
            if i:
                de = zeros(K) + self.x["alpha"][i] * de
                for rows, d_hat in of_before:
                    de = de + rows[i] * d_hat[i]

    def rows_adjoint(self, rows, d_end, readers, drow, da):
        """readers: (rows, dA, drows, whether it reads after its own decay)."""
        rho, a = self.fade_keys(rows), self.x["alpha"]
        for j in range(self.n):
            d = d_end[j]
            for i in range(self.n - 1, j, -1):
                for q, dA, dq, after in readers:
                    if after:
                        d = d + dA[i, j] * q[i]
                        dq[i] = dq[i] + dA[i, j] * rho[i, j]
                da[i] = da[i] + d * rho[i - 1, j]
                d = a[i] * d
                for q, dA, dq, after in readers:
                    if not after:
                        d = d + dA[i, j] * q[i]
                        dq[i] = dq[i] + dA[i, j] * rho[i - 1, j]
            own = [reader for reader in readers if reader[3]]
            for q, dA, dq, _ in own:
                d = d + dA[j, j] * q[j]
                dq[j] = dq[j] + dA[j, j] * rows[j]
            drow[j] = drow[j] + d


class DplrChunk(KeyChunk):
    def __init__(self, x, states, shared):
        self.x, (self.S,), self.n = x, states, len(x["q"])
        n, q, X = self.n, x["q"], x["x"]
        self.fade()
        self.P, self.L, self.end = {}, {}, {}
        for name in "ky":
            rho = self.fade_keys(x[name])
            for i in range(n):
                for j in range(i + 1):
                    self.P[name, i, j] = dot(q[i], rho[i, j])
                for j in range(i):
                    self.L[name, i, j] = dot(X[i], rho[i - 1, j])
            self.end[name] = np.array([rho[n - 1, j] for j in range(n)], object)
        self.q_hat, self.x_hat = q * self.e, X * self.before
        self.p = product(self.x_hat, self.S)
        for i in range(n):
            for j in range(i):
                self.p[i] = self.p[i] + self.L["k", i, j] * x["v"][j]
            for j in range(i):
                self.p[i] = self.p[i] - self.L["y", i, j] * self.p[j]

    def read(self, scale):
        num = product(self.q_hat, self.S)
        for i in range(self.n):
            for j in range(i + 1):
                num[i] = num[i] + self.P["k", i, j] * self.x["v"][j]
                num[i] = num[i] - self.P["y", i, j] * self.p[j]
        return scale * num

    def carry(self):
        S = product(self.end["k"].T, self.x["v"], self.e[-1][:, None] * self.S)
        return [product(self.end["y"].T, -self.p, S)]

    def adjoint(self, do, d_states, scale):
        x, n, (dS,) = self.x, self.n, d_states
        grads, dO, V_, p = empty_gradients(x), scale * do, x["v"], self.p
        dV, dp = product(self.end["k"], dS), product(self.end["y"], -dS)
        dA = {name: {} for name in ("Pk", "Py", "Lk", "Ly")}
        for i in range(n):
            for j in range(i + 1):
                dV[j] = dV[j] + self.P["k", i, j] * dO[i]
                dp[j] = dp[j] + self.P["y", i, j] * -dO[i]
                dA["Pk"][i, j], dA["Py"][i, j] = dot(dO[i], V_[j]), dot(-dO[i], p[j])
        dk_end, dy_end = product(V_, dS.T), product(-p, dS.T)
        de = np.array([dot(self.S[i], dS[i]) for i in range(K)], object)
        for j in reversed(range(n)):
            for i in range(j + 1, n):
                dp[j] = dp[j] - self.L["y", i, j] * dp[i]
        for i in range(n):
            for j in range(i):
                dV[j] = dV[j] + self.L["k", i, j] * dp[i]
                dA["Lk"][i, j], dA["Ly"][i, j] = dot(dp[i], V_[j]), dot(-dp[i], p[j])
        grads["v"] = dV
        dq_hat, dx_hat = product(dO, self.S.T), product(dp, self.S.T)
        dS = product(self.q_hat.T, dO, self.e[-1][:, None] * dS)
        dS = product(self.x_hat.T, dp, dS)
        self.e_adjoint(
            de, [(x["q"], dq_hat)], [(x["x"], dx_hat)], grads["q"], grads["x"], grads["alpha"]
        )
        for name, end in (("k", dk_end), ("y", dy_end)):
            readers = [
                (x["q"], dA[f"P{name}"], grads["q"], True),
                (x["x"], dA[f"L{name}"], grads["x"], False),
            ]
            self.rows_adjoint(x[name], end, readers, grads[name], grads["alpha"])
        return grads, [dS]


class BonusChunk(KeyChunk):
    def __init__(self, x, states, shared):
        self.x, (self.S,), self.n = x, states, len(x["q"])
        n, q = self.n, x["q"]
        self.fade()
        rho = self.fade_keys(x["k"])
        self.P = {(i, j): dot(q[i], rho[i - 1, j]) for i in range(n) for j in range(i)}
        self.end = np.array([rho[n - 1, j] for j in range(n)], object)
        self.q_hat = q * self.before
        if not shared:
            shared["faded"] = [x["bonus"] * x["k"][i] for i in range(n)]
            shared["own"] = [dot(q[i], shared["faded"][i]) for i in range(n)]
        self.own, self.faded = shared["own"], shared["faded"]

    def read(self, scale):
        num = product(self.q_hat, self.S)
        for i in range(self.n):
            for j in range(i):
                num[i] = num[i] + self.P[i, j] * self.x["v"][j]
            num[i] = num[i] + self.own[i] * self.x["v"][i]
        return scale * num

    def carry(self):
        return [product(self.end.T, self.x["v"], self.e[-1][:, None] * self.S)]

    def adjoint(self, do, d_states, scale):
        x, n, (dS,) = self.x, self.n, d_states
        grads, dO = empty_gradients(x), scale * do
        dV, dP = product(self.end, dS), {}
        for i in range(n):
            for j in range(i):
                dV[j] = dV[j] + self.P[i, j] * dO[i]
                dP[i, j] = dot(dO[i], x["v"][j])
            dV[i] = dV[i] + self.own[i] * dO[i]
        grads["v"], down = dV, [dot(x["v"][i], dO[i]) for i in range(n)]
        dk_end, dq_hat = product(x["v"], dS.T), product(dO, self.S.T)
        de = np.array([dot(self.S[i], dS[i]) for i in range(K)], object)
        dS = product(self.q_hat.T, dO, self.e[-1][:, None] * dS)
        self.e_adjoint(de, [], [(x["q"], dq_hat)], None, grads["q"], grads["alpha"])
        readers = [(x["q"], dP, grads["q"], False)]
        self.rows_adjoint(x["k"], dk_end, readers, grads["k"], grads["alpha"])
        for i in range(n):
            grads["q"][i] = grads["q"][i] + down[i] * self.faded[i]
            grads["k"][i] = grads["k"][i] + down[i] * (x["bonus"] * x["q"][i])
            grads["bonus"] = grads["bonus"] + down[i] * (x["q"][i] * x["k"][i])
        return grads, [dS]


class PairChunk:
    def __init__(self, x, states, shared):
        self.x, (self.M, self.Y), self.n = x, states, len(x["q"])
        n, q, k, a, eta = self.n, x["q"], x["k"], x["alpha"], x["eta"]
        self.seen = [(i, j) for i in range(n) for j in range(i + 1)]
        self.before = [(i, j) for i in range(n) for j in range(i)]
        # the shares after token i, row i + 1, as in docs/math.md
        e, f, m, G, N = [ONE], [Counted(0)], [ONE], {}, {}
        for i in range(n):
            m.append(eta[i] * m[-1])
            e.append(a[i] * e[-1])
            f.append(a[i] * f[-1] + m[-1])
            for j in range(i):
                N[i, j] = eta[i] * N[i - 1, j]
                G[i, j] = a[i] * G[i - 1, j] + N[i, j]
            N[i, i] = G[i, i] = ONE
        self.e, self.f, self.m, self.G, self.N = e, f, m, G, N
        if not shared:
            shared["qk"] = {(i, j): dot(q[i], k[j]) for i, j in self.seen}
            shared["kk"] = {(i, j): dot(k[i], k[j]) for i, j in self.before}
        self.qk, self.kk = shared["qk"], shared["kk"]
        self.P = {(i, j): G[i, j] * self.qk[i, j] if j < i else self.qk[i, j] for i, j in self.seen}
        self.L = {(i, j): G[i - 1, j] * self.kk[i, j] for i, j in self.before}
        ends = [n - 1] * (n - 1)
        self.KG = np.array([G[end, j] * k[j] for j, end in enumerate(ends)] + [k[n - 1]], object)
        self.KN = np.array([N[end, j] * k[j] for j, end in enumerate(ends)] + [k[n - 1]], object)
        self.kM, self.kY = product(k, self.M), product(k, self.Y)
        self.E, self.U = zeros(n, V), zeros(n, V)
        for i in range(n):
            p = e[i] * self.kM[i]
            p = p + f[i] * self.kY[i]
            for j in range(i):
                p = p + self.L[i, j] * self.U[j]
            self.E[i] = x["v"][i] - p
            self.U[i] = x["beta"][i] * self.E[i]

    def read(self, scale):
        qM, qY = product(self.x["q"], self.M), product(self.x["q"], self.Y)
        num = zeros(self.n, V)
        for i in range(self.n):
            num[i] = self.e[i + 1] * qM[i]
            num[i] = num[i] + self.f[i + 1] * qY[i]
            for j in range(i + 1):
                num[i] = num[i] + self.P[i, j] * self.U[j]
        return scale * num

    def carry(self):
        M = self.e[-1] * self.M + self.f[-1] * self.Y
        return [product(self.KG.T, self.U, M), product(self.KN.T, self.U, self.m[-1] * self.Y)]

    def adjoint(self, do, d_states, scale):
        x, n, (dM, dY) = self.x, self.n, d_states
        q, k, G, N, e, f, m = x["q"], x["k"], self.G, self.N, self.e, self.f, self.m
        grads, dO, U = empty_gradients(x), scale * do, self.U
        # carry and read
        kdM, kdY = product(k, dM), product(k, dY)
        dU = zeros(n, V)
        for j in range(n):
            dU[j] = G[n - 1, j] * kdM[j]
            dU[j] = dU[j] + N[n - 1, j] * kdY[j]
        for i, j in self.seen:
            dU[j] = dU[j] + self.P[i, j] * dO[i]
        dP = {(i, j): dot(dO[i], U[j]) for i, j in self.seen}
        de, df, dm = [Counted(0)] * (n + 1), [Counted(0)] * (n + 1), [Counted(0)] * (n + 1)
        de[n], df[n] = dot(self.M.ravel(), dM.ravel()), dot(self.Y.ravel(), dM.ravel())
        dm[n] = dot(self.Y.ravel(), dY.ravel())
        dG = dict.fromkeys(self.seen, Counted(0))
        dN = dict.fromkeys(self.seen, Counted(0))
        for j in range(n):
            dG[n - 1, j], dN[n - 1, j] = dot(U[j], kdM[j]), dot(U[j], kdY[j])
        qM, qY = product(q, self.M), product(q, self.Y)
        for i in range(n):
            de[i + 1] = dot(dO[i], qM[i], de[i + 1])
            df[i + 1] = dot(dO[i], qY[i], df[i + 1])
        dOM, dOY = product(dO, self.M.T), product(dO, self.Y.T)
        for i in range(n):
            grads["q"][i] = e[i + 1] * dOM[i]
            grads["q"][i] = grads["q"][i] + f[i + 1] * dOY[i]
        # solve
        dE = zeros(n, V)
        for j in reversed(range(n)):
            for i in range(j + 1, n):
                dU[j] = dU[j] - self.L[i, j] * dE[i]
            dE[j] = x["beta"][j] * dU[j]
            grads["beta"][j] = dot(dU[j], self.E[j])
        grads["v"] = dE
        dL = {(i, j): dot(-dE[i], U[j]) for i, j in self.before}
        for i in range(n):
            de[i] = dot(-dE[i], self.kM[i], de[i])
            df[i] = dot(-dE[i], self.kY[i], df[i])
        # dk of the states
        UdM, UdY = product(U, dM.T), product(U, dY.T)
        dEM, dEY = product(-dE, self.M.T), product(-dE, self.Y.T)
        for j in range(n):
            dk = G[n - 1, j] * UdM[j]
            dk = dk + N[n - 1, j] * UdY[j]
            dk = dk + e[j] * dEM[j]
            grads["k"][j] = dk + f[j] * dEY[j]
        eq, fq = (np.array([w[i + 1] * q[i] for i in range(n)], object) for w in (e, f))
        ek, fk = (np.array([w[i] * k[i] for i in range(n)], object) for w in (e, f))
        dY = f[n] * dM + m[n] * dY
        dM = product(ek.T, -dE, product(eq.T, dO, e[n] * dM))
        dY = product(fk.T, -dE, product(fq.T, dO, dY))
        # scores
        for i, j in self.before:
            dG[i, j] = dG[i, j] + dP[i, j] * self.qk[i, j]
            dP[i, j] = G[i, j] * dP[i, j]
            if j < i - 1:
                dG[i - 1, j] = dG[i - 1, j] + dL[i, j] * self.kk[i, j]
            dL[i, j] = G[i - 1, j] * dL[i, j]
        for i, j in self.seen:
            grads["q"][i] = grads["q"][i] + dP[i, j] * k[j]
            grads["k"][j] = grads["k"][j] + dP[i, j] * q[i]
        for i, j in self.before:
            grads["k"][i] = grads["k"][i] + dL[i, j] * k[j]
            grads["k"][j] = grads["k"][j] + dL[i, j] * k[i]
        # up the recursions
        for i in reversed(range(n)):
            da = de[i + 1] * e[i]
            da = da + df[i + 1] * f[i]
            for j in range(i):
                da = da + dG[i, j] * G[i - 1, j]
                dN[i, j] = dN[i, j] + dG[i, j]
            dm[i + 1] = dm[i + 1] + df[i + 1]
            deta = dm[i + 1] * m[i]
            for j in range(i):
                deta = deta + dN[i, j] * N[i - 1, j]
                if j < i - 1:
                    dG[i - 1, j] = dG[i - 1, j] + x["alpha"][i] * dG[i, j]
                    dN[i - 1, j] = dN[i - 1, j] + x["eta"][i] * dN[i, j]
            if i:
                de[i] = de[i] + x["alpha"][i] * de[i + 1]
                df[i] = df[i] + x["alpha"][i] * df[i + 1]
                dm[i] = dm[i] + x["eta"][i] * dm[i + 1]
            grads["alpha"][i], grads["eta"][i] = da, deta
        return grads, [dM, dY]


CHUNK = dict.fromkeys(DPLR, DplrChunk) | dict.fromkeys(BONUS, BonusChunk)
CHUNK |= dict.fromkeys(PAIR_DECAY, PairChunk)


def chunks_of(p, C):
    """The chunks of each value head, in order; the last one's states are not made."""
    shared = [{} for _ in range(0, p.T, C)]
    for h in range(p.HV):
        states, made = [S[h] for S in p.states], []
        for i, start in enumerate(range(0, p.T, C)):
            states = made[-1].carry() if made else states
            made.append(CHUNK[p.op](p.head(h, slice(start, start + C)), states, shared[i]))
        yield made


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("T", "C", "HV"), [(7, 3, 1), (5, 5, 2), (4, 1, 1)])
def test_chunks_count(op, T, C, HV):
    p = Problem(op, T, HV)
    Counted.done, o, finals = 0, [], []
    for made in chunks_of(p, C):
        o.append(np.concatenate([chunk.read(p.scale) for chunk in made]))
        finals.append(made[-1].carry())
    done = Counted.done
    p.check_forward(o, finals)
    assert linattn.flops(op, T, K, V, HV=HV, chunk_size=C) == done
    assert linattn.flops(op, T, K, V, HV=HV, chunk_size=C, B=3) == 3 * done
    assert linattn.flops(op, T, K, V, H=2, HV=2 * HV, chunk_size=C) == 2 * done


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("T", "C", "HV"), [(7, 3, 1), (5, 5, 2), (6, 3, 3), (4, 1, 1), (2, 2, 1)])
def test_chunks_count_backward(op, T, C, HV):
    p = Problem(op, T, HV)
    Counted.done, by_head, firsts = 0, [], []
    for h, made in enumerate(chunks_of(p, C)):
        d_states, found = [dS[h] for dS in p.d_states], []
        for i in reversed(range(len(made))):
            grads, d_states = made[i].adjoint(p.do[i * C : (i + 1) * C, h], d_states, p.scale)
            found.insert(0, grads)
        of_head = {n: np.concatenate([g[n] for g in found]) for n in found[0] if n != "bonus"}
        if "bonus" in found[0]:
            of_head["bonus"] = sum_plain(found)
        by_head.append(of_head)
        firsts.append(d_states)
    done = p.check_backward(by_head, firsts)
    how = {"HV": HV, "chunk_size": C}
    assert linattn.flops(op, T, K, V, passes="backward", **how) == done
    forward = linattn.flops(op, T, K, V, **how)
    assert linattn.flops(op, T, K, V, passes="both", **how) == forward + done
    if C == T:
        assert linattn.flops(op, T, K, V, HV=HV, mode="parallel", passes="backward") == done
