"""flops and memory, against forms that count every operation as they do it."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.counted import Counted, counted, dot, plain, product, zeros
from support.variants import NORMALISED, PAIR_DECAY, PREDICTS, ops_with

import linattn
from linattn import cost, reference
from linattn.testing import GATES, make_inputs, make_output_gradients


class Rows(NamedTuple):
    """Some tokens of one head: rows of q, k, x, y [n,K], v [n,V], a [n,K or 1], beta and eta [n];
    None where the call has none. bonus and dbonus are [K]."""

    q: Any
    k: Any
    x: Any
    y: Any
    v: Any
    a: Any
    beta: Any
    eta: Any
    bonus: Any
    dbonus: Any

    def at(self, tokens):
        fixed = ("bonus", "dbonus")
        named = {n: z if z is None or n in fixed else z[tokens] for n, z in self._asdict().items()}
        return Rows(**named)

    @property
    def own_x(self):
        return self.x is not None

    @property
    def looking(self):
        return self.x if self.own_x else self.k


class Chunk:
    """Sections 3 and 4 of docs/math.md for n tokens of one head. `bare` has the products of q, x
    and k that heads share, for the first to make."""

    def __init__(self, variant, rows, state, scale, bare):
        self.rows, self.scale, self.bare, self.n = rows, scale, bare, len(rows.q)
        self.q, self.k, self.x, self.v, self.a = rows.q, rows.k, rows.looking, rows.v, rows.a
        self.beta = rows.beta
        self.S, self.z = state[0], state[1] if variant.normaliser else None
        self.by_key, self.decays = variant.decay == "key", variant.decay != "none"
        self.delta, self.normalize = variant.rule == "delta", variant.normaliser
        self.at_or_before = [(i, j) for i in range(self.n) for j in range(i + 1)]
        self.before = [(i, j) for i in range(self.n) for j in range(i)]
        self.e, self.G = [], {}
        self.fade()
        self.make_scores()
        self.make_hats()
        self.solve()
        if self.normalize:
            self.make_denominators()

    def make_bare(self):
        if not self.bare:
            seen = self.rho if self.by_key else {(i, j): self.k[j] for i, j in self.at_or_before}
            self.bare["qk"] = {(i, j): dot(self.q[i], seen[i, j]) for i, j in self.at_or_before}
            if self.delta:
                self.bare["kk"] = {(i, j): dot(self.x[i], seen[i, j]) for i, j in self.before}
        return dict(self.bare["qk"]), dict(self.bare.get("kk", {}))

    def make_scores(self):
        if self.by_key:
            self.bare = {}
        self.P, self.L = self.make_bare()
        for pair, by in self.G.items():
            self.P[pair] = self.P[pair] * by
            if self.delta:
                self.L[pair] = self.L[pair] * by

    def make_hats(self):
        self.q_hat, self.x_hat = self.q, self.x
        if self.decays:
            self.q_hat = self.q * self.e
            if self.delta:
                self.x_hat = self.x * self.e
        self.k_tilde = self.k.copy()
        for j in range(self.n - 1):
            if self.by_key:
                self.k_tilde[j] = self.rho[self.n - 1, j]
            elif self.decays:
                self.k_tilde[j] = self.k[j] * self.G[self.n - 1, j]

    def make_denominators(self):
        self.den = [dot(self.q_hat[i], self.z) for i in range(self.n)]
        for i, j in self.at_or_before:
            self.den[i] = self.den[i] + self.P[i, j]
        self.den = [self.scale * x for x in self.den]

    def fade(self):
        one = counted(np.ones(self.a.shape[1]))
        for i in range(self.n if self.decays else 0):
            self.e.append(self.a[i] * (self.e[-1] if i else one))
            for j in range(i):
                if not self.by_key:
                    self.G[i, j] = self.a[i, 0] * (self.G[i - 1, j] if j < i - 1 else one[0])
        if self.by_key:
            self.rho = self.faded(self.k)

    def faded(self, rows):
        rho = {}
        for j in range(self.n):
            rho[j, j] = rows[j]
            for i in range(j + 1, self.n):
                rho[i, j] = self.a[i] * rho[i - 1, j]
        return rho

    def solve(self):
        self.U = self.v
        if not self.delta:
            return
        self.E, self.U = zeros(*self.v.shape), zeros(*self.v.shape)
        for i in range(self.n):
            p = product(self.x_hat[i][None], self.S)[0]
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

    def decayed(self, S):
        if not self.decays:
            return S
        return self.e[-1][:, None] * S if self.by_key else self.e[-1][0] * S

    def carry(self):
        z = self.z
        S = product(self.k_tilde.T, self.U, self.decayed(self.S))
        if self.normalize:
            for key in self.k:
                z = z + key
        return (S, z) if self.normalize else (S,)

    def adjoint(self, do, d_state):
        """Section 6: the gradients by name, and that of the state before."""
        n, dS, dz = self.n, d_state[0], d_state[1] if self.normalize else None
        dO = self.scale * do
        if self.normalize:
            dO = dO / np.array(self.den, object)[:, None]
        # carry and read
        dU = product(self.k_tilde, dS)
        for i, j in self.at_or_before:
            dU[j] = dU[j] + self.P[i, j] * dO[i]
        dP = {(i, j): dot(dO[i], self.U[j]) for i, j in self.at_or_before}
        dk_tilde = product(self.U, dS.T)
        ends = self.ends(dS)
        # solve
        dL, dbeta, dv = {}, None, dU
        if self.delta:
            dE, dbeta = zeros(*dU.shape), zeros(n)
            for j in reversed(range(n)):
                for i in range(j + 1, n):
                    dU[j] = dU[j] + self.L[i, j] * -dE[i]
                dE[j] = self.beta[j] * dU[j]
                dbeta[j] = dot(dU[j], self.E[j])
            dL = {(i, j): dot(-dE[i], self.U[j]) for i, j in self.before}
            dv = dE
        # X
        dq_hat = product(dO, self.S.T)
        dx_hat = product(-dE, self.S.T) if self.delta else None
        dS = product(self.q_hat.T, dO, self.decayed_back(dS))
        if self.delta:
            dS = product(self.x_hat.T, -dE, dS)
        # the normaliser
        dk = zeros(*self.k.shape)
        if self.normalize:
            d_den = zeros(n)
            dk = np.array([dz] * n, object)
            for i in range(n):
                total = dot(self.q[i], dq_hat[i])
                for j in range(i + 1):
                    total = total + self.P[i, j] * dP[i, j]
                d_den[i] = self.scale * -total / self.den[i]
                dq_hat[i] = dq_hat[i] + d_den[i] * self.z
                for j in range(i + 1):
                    dP[i, j] = dP[i, j] + d_den[i]
            for i in range(n):
                dz = dz + d_den[i] * self.q[i]
        dx = zeros(*dk.shape) if self.rows.own_x else dk
        d = {"q": zeros(*dk.shape), "k": dk, "x": dx, "a": zeros(*self.a.shape)}
        self.scores_adjoint(dP, dL, d, dq_hat, dx_hat, dk_tilde, ends)
        d |= {"v": dv, "beta": dbeta}
        return d, ((dS, dz) if self.normalize else (dS,))

    def ends(self, dS):
        """The gradient of e at the chunk's end."""
        if not self.decays:
            return None
        if self.by_key:
            return np.array([dot(*rows) for rows in zip(self.S, dS, strict=True)], object)
        return np.array([dot(self.S.ravel(), dS.ravel())], object)

    def decayed_back(self, dS):
        return self.decayed(dS)

    def scores_adjoint(self, *given):
        (self.scores_of_keys if self.by_key else self.scores_of_tokens)(*given)

    def bare_adjoint(self, dP, dL, d):
        for i, j in self.at_or_before:
            d["q"][i] = d["q"][i] + dP[i, j] * self.k[j]
            d["k"][j] = d["k"][j] + dP[i, j] * self.q[i]
        for i, j in dL:
            d["x"][i] = d["x"][i] + dL[i, j] * self.k[j]
            d["k"][j] = d["k"][j] + dL[i, j] * self.x[i]

    def scores_of_tokens(self, dP, dL, d, dq_hat, dx_hat, dk_tilde, de):
        n, q, k, x, a, e = self.n, self.q, self.k, self.x, self.a, self.e
        dq, dk, dx, da, dG = d["q"], d["k"], d["x"], d["a"], {}
        for pair, by in self.G.items():
            dG[pair] = dP[pair] * self.bare["qk"][pair]
            dP[pair] = by * dP[pair]
            if self.delta:
                dG[pair] = dG[pair] + dL[pair] * self.bare["kk"][pair]
                dL[pair] = by * dL[pair]
        self.bare_adjoint(dP, dL, d)
        for i in range(n):
            last = i == n - 1 or not self.decays
            dk[i] = dk[i] + (dk_tilde[i] if last else self.G[n - 1, i] * dk_tilde[i])
            dq[i] = dq[i] + (e[i] * dq_hat[i] if self.decays else dq_hat[i])
            if self.delta:
                dx[i] = dx[i] + (e[i] * dx_hat[i] if self.decays else dx_hat[i])
            if not last:
                dG[n - 1, i] = dot(k[i], dk_tilde[i], dG[n - 1, i])
        one = Counted(1)
        for i in reversed(range(n if self.decays else 0)):
            de[0] = dot(q[i], dq_hat[i], de[0])
            if self.delta:
                de[0] = dot(x[i], dx_hat[i], de[0])
            da[i] = de * (e[i - 1] if i else one)
            for j in range(i):
                da[i] = da[i] + dG[i, j] * (self.G[i - 1, j] if j < i - 1 else one)
                if j < i - 1:
                    dG[i - 1, j] = dG[i - 1, j] + a[i, 0] * dG[i, j]
            if i:
                de = zeros(1) + a[i] * de

    def scores_of_keys(self, dP, dL, d, dq_hat, dx_hat, dk_tilde, de):
        n, q, k, x, a, e = self.n, self.q, self.k, self.x, self.a, self.e
        dq, dk, dx, da = d["q"], d["k"], d["x"], d["a"]
        one = Counted(1)
        for i in reversed(range(n)):
            de = de + q[i] * dq_hat[i]
            dq[i] = dq[i] + e[i] * dq_hat[i]
            if self.delta:
                de = de + x[i] * dx_hat[i]
                dx[i] = dx[i] + e[i] * dx_hat[i]
            da[i] = de * (e[i - 1] if i else one)
            if i:
                de = zeros(len(de)) + a[i] * de
        rho = self.faded(k)
        for j in range(n):
            up = dk_tilde[j]
            for i in range(n - 1, j, -1):
                up = up + dP[i, j] * q[i]
                dq[i] = dq[i] + dP[i, j] * rho[i, j]
                if self.delta:
                    up = up + dL[i, j] * x[i]
                    dx[i] = dx[i] + dL[i, j] * rho[i, j]
                da[i] = da[i] + up * rho[i - 1, j]
                up = a[i] * up
            dk[j] = dk[j] + (up + dP[j, j] * q[j])
            dq[j] = dq[j] + dP[j, j] * k[j]


class EarlyChunk:
    """Section 16, of the rules that look before the decay: x of a diagonal plus a low rank, and q
    with a bonus. A decay by key."""

    def __init__(self, variant, rows, state, scale, bare):
        self.rows, self.scale, self.n, (self.S,) = rows, scale, len(rows.q), state
        self.dplr = rows.y is not None
        self.at_or_before = [(i, j) for i in range(self.n) for j in range(i + 1)]
        self.before = [(i, j) for i in range(self.n) for j in range(i)]
        r, self.one = rows, counted(np.ones(rows.a.shape[1]))
        self.written = [r.k, r.y] if self.dplr else [r.k]
        e = [self.one]
        for decay in r.a:
            e.append(decay * e[-1])
        self.e, self.e_before = np.array(e[1:]), np.array(e[:-1])
        self.rho = [self.faded(row) for row in self.written]
        self.tilde = [np.array([rho[self.n - 1, j] for j in range(self.n)]) for rho in self.rho]
        if self.dplr:
            self.P = [
                {at: dot(r.q[at[0]], rho[at]) for at in self.at_or_before} for rho in self.rho
            ]
            self.L = [
                {(i, j): dot(r.x[i], rho[i - 1, j]) for i, j in self.before} for rho in self.rho
            ]
            self.q_hat, self.x_hat = r.q * self.e, r.x * self.e_before
        else:
            (rho,) = self.rho
            own = {(i, i): dot(r.q[i], r.bonus * r.k[i]) for i in range(self.n)}
            self.P = [{(i, j): dot(r.q[i], rho[i - 1, j]) for i, j in self.before} | own]
            self.q_hat = r.q * self.e_before
        self.solve()

    def faded(self, rows):
        return Chunk.faded(SimpleNamespace(n=self.n, a=self.rows.a), rows)

    def solve(self):
        self.U = [self.rows.v]
        if not self.dplr:
            return
        V, W = self.rows.v, zeros(*self.rows.v.shape)
        for i in range(self.n):
            p = product(self.x_hat[i][None], self.S)[0]
            for j in range(i):
                p = p + self.L[0][i, j] * V[j]
                p = p + self.L[1][i, j] * W[j]
            W[i] = -p
        self.U.append(W)

    def read(self):
        num = product(self.q_hat, self.S)
        for P, U in zip(self.P, self.U, strict=True):
            for i, j in self.at_or_before:
                num[i] = num[i] + P[i, j] * U[j]
        return self.scale * num

    def carry(self):
        S = self.e[-1][:, None] * self.S
        for tilde, U in zip(self.tilde, self.U, strict=True):
            S = product(tilde.T, U, S)
        return (S,)

    def adjoint(self, do, d_state):
        n, r, (dS,) = self.n, self.rows, d_state
        dO = self.scale * do
        # carry and read
        dU = [product(tilde, dS) for tilde in self.tilde]
        for P, d_row in zip(self.P, dU, strict=True):
            for i, j in self.at_or_before:
                d_row[j] = d_row[j] + P[i, j] * dO[i]
        dP = [{(i, j): dot(dO[i], U[j]) for i, j in self.at_or_before} for U in self.U]
        d_tilde = [product(U, dS.T) for U in self.U]
        de = np.array([dot(*rows) for rows in zip(self.S, dS, strict=True)], object)
        # solve: was W = -(x^ S + L U)
        dL = []
        if self.dplr:
            minus = np.empty_like(dU[1])
            for j in reversed(range(n)):
                for i in range(j + 1, n):
                    dU[1][j] = dU[1][j] + self.L[1][i, j] * minus[i]
                minus[j] = -dU[1][j]
            for i, j in self.before:
                dU[0][j] = dU[0][j] + self.L[0][i, j] * minus[i]
            dL = [{(i, j): dot(minus[i], U[j]) for i, j in self.before} for U in self.U]
        # X
        dq_hat = product(dO, self.S.T)
        dx_hat = product(minus, self.S.T) if self.dplr else None
        dS = product(self.q_hat.T, dO, self.e[-1][:, None] * dS)
        if self.dplr:
            dS = product(self.x_hat.T, minus, dS)
        d = {name: zeros(*r.q.shape) for name in ("q", "k", "x", "y", "a")}
        self.hats_adjoint(d, dq_hat, dx_hat, de)
        for w, name in enumerate(["k", "y"][: len(self.written)]):
            self.scores_adjoint(d, name, d_tilde[w], dP[w], dL[w] if dL else None)
        return d | {"v": dU[0]}, (dS,)

    def hats_adjoint(self, d, dq_hat, dx_hat, de):
        r = self.rows
        for i in reversed(range(self.n)):
            if self.dplr:
                de = de + r.q[i] * dq_hat[i]
                d["q"][i] = d["q"][i] + self.e[i] * dq_hat[i]
            d["a"][i] = de * self.e_before[i]
            if i:
                de = zeros(len(de)) + r.a[i] * de
            # of e_{i-1}, which is a constant for the first token
            looking, d_hat, name = (r.x, dx_hat, "x") if self.dplr else (r.q, dq_hat, "q")
            d[name][i] = d[name][i] + self.e_before[i] * d_hat[i]
            if i:
                de = de + looking[i] * d_hat[i]

    def scores_adjoint(self, d, name, d_tilde, dP, dL):
        r, row = self.rows, getattr(self.rows, name)
        rho = self.faded(row)
        for j in range(self.n):
            up = d_tilde[j]
            for i in range(self.n - 1, j, -1):
                if self.dplr:
                    up = up + dP[i, j] * r.q[i]
                    d["q"][i] = d["q"][i] + dP[i, j] * rho[i, j]
                d["a"][i] = d["a"][i] + up * rho[i - 1, j]
                up = r.a[i] * up
                if self.dplr:
                    up = up + dL[i, j] * r.x[i]
                    d["x"][i] = d["x"][i] + dL[i, j] * rho[i - 1, j]
                else:
                    up = up + dP[i, j] * r.q[i]
                    d["q"][i] = d["q"][i] + dP[i, j] * rho[i - 1, j]
            if self.dplr:
                d[name][j] = d[name][j] + (up + dP[j, j] * r.q[j])
                d["q"][j] = d["q"][j] + dP[j, j] * row[j]
                continue
            own_adjoint(r, j, dP[j, j], d["q"], d["k"])
            d["k"][j] = d["k"][j] + up


def own_adjoint(r, j, weight, dq, dk):
    """Was q . (bonus * k), whose gradient is `weight`."""
    dq[j] = dq[j] + weight * (r.bonus * r.k[j])
    dk[j] = dk[j] + weight * (r.bonus * r.q[j])
    r.dbonus[:] = r.dbonus + weight * (r.q[j] * r.k[j])


class PairChunk(Chunk):
    """Section 16, of a memory and its momentum: S = [M; Y], and rows of 2K."""

    def __init__(self, variant, rows, state, scale, bare):
        super().__init__(variant, rows, (np.concatenate(state),), scale, bare)

    def fade(self):
        self.apart = [(i, j) for i, j in self.before if j < i - 1]
        one, a, eta = Counted(1), self.a[:, 0], self.rows.eta
        self.e, self.f, self.m, self.N = [one], [Counted(0)], [one], {}
        for i in range(self.n):
            self.m.append(eta[i] * self.m[-1])
            self.f.append(a[i] * self.f[-1] + self.m[-1])
            self.e.append(a[i] * self.e[-1])
            self.G[i, i] = self.N[i, i] = one
            for j in range(i):
                self.N[i, j] = eta[i] * self.N[i - 1, j]
                self.G[i, j] = a[i] * self.G[i - 1, j] + self.N[i, j]

    def make_scores(self):
        self.P, self.L = self.make_bare()
        for i, j in self.before:
            self.P[i, j] = self.P[i, j] * self.G[i, j]
        for i, j in self.apart:
            self.L[i, j] = self.L[i, j] * self.G[i - 1, j]

    def make_hats(self):
        n = self.n
        e, f = (np.array(x, object)[:, None] for x in (self.e, self.f))
        self.q_hat = np.concatenate([e[1:] * self.q, f[1:] * self.q], 1)
        self.x_hat = np.concatenate([e[:-1] * self.k, f[:-1] * self.k], 1)
        G, N = (
            np.array([x[n - 1, j] for j in range(n - 1)], object).reshape(-1, 1)
            for x in (self.G, self.N)
        )
        carried = np.concatenate([G * self.k[:-1], N * self.k[:-1]], 1)
        self.k_tilde = np.concatenate([carried, np.concatenate([self.k[-1:]] * 2, 1)])

    def decayed(self, S):
        M, Y = np.split(S, 2)
        return np.concatenate([self.e[-1] * M + self.f[-1] * Y, self.m[-1] * Y])

    def decayed_back(self, dS):
        dM, dY = np.split(dS, 2)
        return np.concatenate([self.e[-1] * dM, self.f[-1] * dM + self.m[-1] * dY])

    def carry(self):
        return tuple(np.split(super().carry()[0], 2))

    def adjoint(self, do, d_state):
        d, (dS,) = super().adjoint(do, (np.concatenate(d_state),))
        return d, tuple(np.split(dS, 2))

    def ends(self, dS):
        (M, Y), (dM, dY) = np.split(self.S, 2), np.split(dS, 2)
        return [dot(x.ravel(), dx.ravel()) for x, dx in ((M, dM), (Y, dM), (Y, dY))]

    def scores_adjoint(self, dP, dL, d, dq_hat, dx_hat, dk_tilde, ends):
        n, K, q, k, a, eta = self.n, len(self.k[0]), self.q, self.k, self.a[:, 0], self.rows.eta
        dq, dk, da, (de, df, dm) = d["q"], d["k"], d["a"], ends
        dG, dN, deta = {}, {at: Counted(0) for at in self.before}, zeros(n)
        for at in self.before:
            dG[at] = dP[at] * self.bare["qk"][at]
            dP[at] = self.G[at] * dP[at]
        for i, j in self.apart:
            dG[i - 1, j] = dG[i - 1, j] + dL[i, j] * self.bare["kk"][i, j]
            dL[i, j] = self.G[i - 1, j] * dL[i, j]
        self.bare_adjoint(dP, dL, d)
        for i in range(n):
            to_M, to_Y = dk_tilde[i, :K], dk_tilde[i, K:]
            if i == n - 1:
                dk[i] = dk[i] + to_M + to_Y
                continue
            dk[i] = dk[i] + self.G[n - 1, i] * to_M + self.N[n - 1, i] * to_Y
            dG[n - 1, i] = dot(k[i], to_M, dG[n - 1, i])
            dN[n - 1, i] = dot(k[i], to_Y, dN[n - 1, i])
        for i in reversed(range(n)):
            e, f, m = self.e[i], self.f[i], self.m[i]  # those of the token before
            to_M, to_Y = dq_hat[i, :K], dq_hat[i, K:]
            de, df = dot(q[i], to_M, de), dot(q[i], to_Y, df)
            dq[i] = dq[i] + self.e[i + 1] * to_M + self.f[i + 1] * to_Y
            dm = dm + df
            da[i, 0], deta[i] = de * e + df * f, dm * m
            for j in range(i):
                dN[i, j] = dN[i, j] + dG[i, j]
                da[i, 0] = da[i, 0] + dG[i, j] * self.G[i - 1, j]
                deta[i] = deta[i] + dN[i, j] * self.N[i - 1, j]
                if j < i - 1:
                    dG[i - 1, j] = dG[i - 1, j] + a[i] * dG[i, j]
                    dN[i - 1, j] = dN[i - 1, j] + eta[i] * dN[i, j]
            to_M, to_Y = dx_hat[i, :K], dx_hat[i, K:]
            dk[i] = dk[i] + e * to_M + f * to_Y
            if i:
                zero = Counted(0)
                de, df, dm = zero + a[i] * de, zero + a[i] * df, zero + eta[i] * dm
                de, df = dot(k[i], to_M, de), dot(k[i], to_Y, df)
        d["eta"] = deta


def chunk_of(variant):
    if variant.decay == "pair":
        return PairChunk
    return EarlyChunk if variant.rule in ("dplr", "bonus") else Chunk


SCALE, K, V = 3**-0.5, 3, 2


class Problem:
    """A batch row of an op on numbers that count, with one head of q and k; and what it expects."""

    def __init__(self, op, T, HV=1, own_x=False):
        rng = np.random.default_rng(0)
        self.op, self.T, self.HV, self.variant = op, T, HV, linattn.VARIANTS[op]
        self.normalize, self.own_x = op in NORMALISED, own_x
        self.two = self.normalize or op in PAIR_DECAY
        x = make_inputs(op, rng, T=T, HV=HV, K=K, V=V, initial_state=True, x=own_x)
        if self.normalize:
            x["q"], x["k"] = abs(x["q"]), abs(x["k"])
            x["initial_state"] = tuple(map(abs, x["initial_state"]))
        if "g" in x:
            x["alpha"] = np.exp(x.pop("g"))  # its gradient is that of the decay
        made = make_output_gradients(op, rng, x)
        self.do, d_final = made["do"], made["d_final_state"]
        how = {"feature_map": "identity", "normalize": "clamp"} if self.normalize else {}
        how["scale"] = SCALE
        self.o, self.final = getattr(reference, op)(**x, **how)
        self.gradients = reference.backward(op, self.do, **x, **how, d_final_state=d_final)
        a = np.ones((T, HV, 1))
        if self.variant.decay == "head":
            a = a * (x["gamma"] if "gamma" in x else np.exp(-x["slopes"]))[:, None]
        elif self.variant.decay != "none":
            a = x["alpha"].reshape(T, HV, -1)
        self.a, self.given = a, x
        self.state, self.d_state = (self.arrays_of(z) for z in (x["initial_state"], d_final))

    def arrays_of(self, state):
        """The arrays of a state, [HV,K,V] or [HV,K]."""
        return [z[0] for z in (state if self.two else (state,))]

    def counted(self):
        """The rows of each head, and its state; the scale."""

        def rows(h):
            of = {name: self.given.get(name) for name in ("q", "k", "x", "y")}
            of = {name: None if z is None else z[0, :, 0] for name, z in of.items()}
            for name in ("v", "beta", "eta"):
                of[name] = self.given[name][0, :, h] if name in self.given else None
            of |= {"a": self.a[:, h], "bonus": self.given.get("bonus")}
            of["bonus"] = None if of["bonus"] is None else of["bonus"][0]
            counting = {name: None if z is None else counted(z) for name, z in of.items()}
            return Rows(**counting, dbonus=dbonus)

        dbonus = zeros(K)
        states = [tuple(counted(z[h]) for z in self.state) for h in range(self.HV)]
        return [rows(h) for h in range(self.HV)], states, Counted(SCALE)

    def check_forward(self, o, states):
        """o [T,HV,V]; states: of each head."""
        same(o, self.o[0])
        for got, want in zip(zip(*states, strict=True), self.arrays_of(self.final), strict=True):
            same(got, want)

    def check_backward(self, d, dbonus, states):
        """d: the gradients by name, those of q, k, x and y [T,K], the others by head."""
        want = self.gradients
        for name in ("q", "k", *(n for n in "xy" if n in self.given)):
            same(d[name], getattr(want, f"d{name}")[0, :, 0])
        for name in ("v", *(n for n in ("beta", "eta") if n in self.given)):
            same(d[name], getattr(want, f"d{name}")[0])
        if "bonus" in self.given:
            same(dbonus, want.dbonus[0])
        if self.variant.decay == "head":
            sign = -self.a[0, :, 0] if self.op == "lightning_attention" else 1
            np.testing.assert_allclose(sign * plain(d["a"]), want.dg, rtol=1e-10, atol=1e-12)
        elif self.variant.decay != "none":
            same(d["a"].reshape(want.dg[0].shape), want.dg[0])
        first = self.arrays_of(want.d_initial_state)
        for got, right in zip(zip(*states, strict=True), first, strict=True):
            same(got, right)

    def gathered(self, by_head):
        """Of dicts by head: the sums over the heads of q's gradients, and the others side by side.
        That of a gate is as the gate is given: summed over the tokens for a constant."""
        d = {}
        for name in by_head[0]:
            parts = [of[name] for of in by_head]
            if parts[0] is None or (name == "x" and not self.given_x) or self.idle(name):
                continue
            d[name] = summed(parts) if name in ("q", "k", "x", "y") else np.stack(parts, 1)
        if self.variant.decay == "head":
            total = zeros(self.HV)
            for t in range(self.T):
                total = total + d["a"][t, :, 0]
            d["a"] = total
        return d

    @property
    def given_x(self):
        return "x" in self.given

    def idle(self, name):
        """No gradient of this call."""
        return (name == "y" and name not in self.given) or (
            name == "a" and self.variant.decay == "none"
        )


def same(got, want):
    np.testing.assert_allclose(plain(np.array(got, object)), want, rtol=1e-10, atol=1e-12)


def chunks_of(p, C):
    """The chunks of each head in their order."""
    rows, states, scale = p.counted()
    starts = range(0, p.T, C)
    bare = [{} for _ in starts]
    for of_head, state in zip(rows, states, strict=True):
        made = []
        for start, shared in zip(starts, bare, strict=True):
            if made:
                state = made[-1].carry()
            tokens = of_head.at(slice(start, start + C))
            made.append(chunk_of(p.variant)(p.variant, tokens, state, scale, shared))
        yield made


# Each op, and the ops that take x once more, with it.
CALLS = [*((op, False) for op in GATES), *((op, True) for op in PREDICTS)]
EVERY_CALL = pytest.mark.parametrize(
    ("op", "own_x"), CALLS, ids=[f"{op}-x" if own_x else op for op, own_x in CALLS]
)


@EVERY_CALL
@pytest.mark.parametrize(("T", "C", "HV"), [(7, 3, 1), (5, 5, 2), (4, 1, 1), (6, 2, 2)])
def test_chunks_count(op, own_x, T, C, HV):
    p = Problem(op, T, HV, own_x)
    Counted.done = 0
    o, finals = [], []
    for made in chunks_of(p, C):
        o.append(np.concatenate([chunk.read() for chunk in made]))
        finals.append(made[-1].carry())
    done = Counted.done
    p.check_forward(np.stack(o, 1), finals)
    assert linattn.flops(op, T, K, V, HV=HV, chunk_size=C, x=own_x) == done
    assert linattn.flops(op, T, K, V, HV=HV, chunk_size=C, B=3, x=own_x) == 3 * done
    if C == T:
        assert linattn.flops(op, T, K, V, HV=HV, mode="parallel", x=own_x) == done


def summed(by_head):
    """The sum over heads."""
    total = by_head[0]
    for x in by_head[1:]:
        total = total + x
    return total


@EVERY_CALL
@pytest.mark.parametrize(("T", "C", "HV"), [(7, 3, 1), (5, 5, 2), (6, 3, 3), (4, 1, 1), (2, 2, 1)])
def test_chunks_count_backward(op, own_x, T, C, HV):
    p = Problem(op, T, HV, own_x)
    do = counted(p.do[0])
    d_states = [tuple(counted(z[h]) for z in p.d_state) for h in range(HV)]
    Counted.done = 0
    by_head, first = [], []
    for h, made in enumerate(chunks_of(p, C)):
        state, of_head = d_states[h], []
        for i in reversed(range(len(made))):
            found, state = made[i].adjoint(do[i * C : (i + 1) * C, h], state)
            of_head.insert(0, found)
        first.append(state)
        by_head.append(
            {
                name: None if z is None else np.concatenate([of[name] for of in of_head])
                for name, z in of_head[0].items()
            }
        )
    d = p.gathered(by_head)
    done = Counted.done
    p.check_backward(d, made[0].rows.dbonus, first)
    how = {"HV": HV, "chunk_size": C, "x": own_x}
    assert linattn.flops(op, T, K, V, passes="backward", **how) == done
    assert linattn.flops(op, T, K, V, passes="backward", B=3, **how) == 3 * done
    how_twice = how | {"H": 2, "HV": 2 * HV}
    assert linattn.flops(op, T, K, V, passes="backward", **how_twice) == 2 * done
    forward = linattn.flops(op, T, K, V, **how)
    assert linattn.flops(op, T, K, V, passes="both", **how) == forward + done
    if C == T:
        how = {"HV": HV, "mode": "parallel", "x": own_x}
        assert linattn.flops(op, T, K, V, passes="backward", **how) == done


class Token(NamedTuple):
    """What a token's adjoint needs: states before it and after it, its prediction's state, its
    error, its write, the values that x finds, own, and the denominator."""

    before: Any
    after: Any
    looked: Any
    E: Any
    U: Any
    W: Any
    own: Any
    den: Any


def tokens_of(p, h):
    """Sections 2 and 16 of docs/math.md for a head."""
    rows, states, scale = p.counted()
    r, state, rule = rows[h], states[h], p.variant.rule
    early = rule == "dplr" or p.variant.decay == "pair"  # the prediction is before the decay
    for t in range(p.T):
        before, S = state, state[0]
        den = E = W = own = None
        if rule == "bonus":
            own = dot(r.q[t], r.bonus * r.k[t])
        U, looked, decayed = r.v[t], S, S
        if p.variant.decay != "none":
            decayed = r.a[t][:, None] * S
        looked = S if early else decayed
        if rule in ("delta", "dplr"):
            found = product(r.looking[t][None], looked)[0]
        if rule == "delta":
            E = r.v[t] - found
            U = r.beta[t] * E
        if rule == "dplr":
            W = -found
        if p.variant.decay == "pair":
            Y = r.eta[t] * state[1] + r.k[t][:, None] * U
            state = decayed + Y, Y
        else:
            S = decayed + r.k[t][:, None] * U
            if rule == "dplr":
                S = S + r.y[t][:, None] * W
            state = (S, *state[1:])
        if p.normalize:
            state = state[0], state[1] + r.k[t]
            den = scale * dot(r.q[t], state[1])
        yield Token(before, state, looked, E, U, W, own, den)


@EVERY_CALL
def test_the_recurrence_counts(op, own_x):
    p = Problem(op, 4, own_x=own_x)
    (r,), _, scale = p.counted()
    Counted.done, o = 0, []
    kept = list(tokens_of(p, 0))
    for t, token in enumerate(kept):
        S = (token.before if token.own is not None else token.after)[0]
        num = product(r.q[t][None], S)
        if token.own is not None:
            num = num + token.own * r.v[t]
        num = num * scale
        o.append(num / token.den if p.normalize else num)
    done = Counted.done
    p.check_forward(o, [kept[-1].after])
    assert linattn.flops(op, 4, K, V, mode="recurrent", x=own_x) == done
    assert linattn.flops(op, 1, K, V, mode="recurrent", x=own_x) * 4 == done


def token_adjoint(p, r, t, token, dnum, d_state, d):
    """Sections 5 and 16 of docs/math.md, line by line: into d, and the gradient of the state
    before. dnum is divided by the denominator."""
    dS, before, rule = d_state[0], token.before[0], p.variant.rule
    if rule != "bonus":
        d["q"][t] = product(token.after[0], dnum[:, None])[:, 0]
        dS = dS + r.q[t][:, None] * dnum
    d_write, dY = dS, None
    if p.variant.decay == "pair":
        d_write = dY = d_state[1] + dS
    dz = d_state[1] if p.normalize else None
    if p.normalize:
        d_den = Counted(SCALE) * -dot(r.q[t], d["q"][t]) / token.den
        d["q"][t] = d["q"][t] + d_den * token.after[1]
        dz = dz + d_den * r.q[t]
    start = dz[:, None] if p.normalize else None
    d["k"][t] = product(d_write, token.U[:, None], start)[:, 0]
    dU = product(r.k[t][None], d_write)[0]
    d["v"][t], dp = dU, None
    if rule == "dplr":
        d["y"][t] = product(dS, token.W[:, None])[:, 0]
        dp = -product(r.y[t][None], dS)[0]
    if rule == "delta":
        d["beta"][t] = dot(token.E, dU)
        d["v"][t] = r.beta[t] * dU
        dp = -d["v"][t]
    if dp is not None:
        start = None if r.own_x else d["k"][t][:, None]
        d["x" if r.own_x else "k"][t] = product(token.looked, dp[:, None], start)[:, 0]
    late = token.looked is not before or p.variant.decay == "none"
    if dp is not None and late:
        dS = dS + r.looking[t][:, None] * dp
    if p.variant.decay == "key":
        d["a"][t] = [dot(*rows) for rows in zip(before, dS, strict=True)]
    elif p.variant.decay != "none":
        d["a"][t] = dot(before.ravel(), dS.ravel())
    if p.variant.decay != "none":
        dS = r.a[t][:, None] * dS
    if dp is not None and not late:
        dS = dS + r.looking[t][:, None] * dp
    if rule == "bonus":
        d["q"][t] = product(before, dnum[:, None])[:, 0]
        dS = dS + r.q[t][:, None] * dnum
        d["v"][t] = d["v"][t] + token.own * dnum
        own_adjoint(r, t, dot(r.v[t], dnum), d["q"], d["k"])
    if p.variant.decay == "pair":
        d["eta"][t] = dot(token.before[1].ravel(), dY.ravel())
        return dS, r.eta[t] * dY
    return (dS, dz) if p.normalize else (dS,)


@EVERY_CALL
@pytest.mark.parametrize("HV", [1, 2])
def test_the_recurrence_counts_backward(op, own_x, HV):
    p = Problem(op, 4, HV, own_x)
    rows, _, scale = p.counted()
    do = counted(p.do[0])
    d_states = [tuple(counted(z[h]) for z in p.d_state) for h in range(HV)]
    Counted.done, by_head, first = 0, [], []
    for h, r in enumerate(rows):
        kept, state = list(tokens_of(p, h)), d_states[h]
        d = {
            name: None if z is None else np.empty(z.shape, object)
            for name, z in r._asdict().items()
            if name not in ("bonus", "dbonus")
        }
        for t in reversed(range(4)):
            dnum = do[t, h] * scale
            if p.normalize:
                dnum = dnum / kept[t].den
            state = token_adjoint(p, r, t, kept[t], dnum, state, d)
        by_head.append(d)
        first.append(state)
    d = p.gathered(by_head)
    done = Counted.done
    p.check_backward(d, rows[0].dbonus, first)
    how = {"HV": HV, "mode": "recurrent", "x": own_x}
    assert linattn.flops(op, 4, K, V, passes="backward", **how) == done
    forward = linattn.flops(op, 4, K, V, **how)
    assert linattn.flops(op, 4, K, V, passes="both", **how) == forward + done


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


def largest_terms(op, passes):
    """The factors in the table of docs/math.md, from differences of counts."""

    def of_token(K, V):
        return linattn.flops(op, 1, K, V, mode="recurrent", passes=passes)

    def of_chunk(n, K, V):
        two, one = (linattn.flops(op, t * n, K, V, chunk_size=n, passes=passes) for t in (2, 1))
        return two - one

    def of_K_V(count):
        return count(9, 9) - count(8, 9) - count(9, 8) + count(8, 8)

    def squared(one, other):
        """The factor of n^2 in what a K or V more costs."""
        more = [of_chunk(n, *one) - of_chunk(n, *other) for n in (7, 8, 9)]
        return (more[0] - 2 * more[1] + more[2]) / 2

    of_8, of_9 = (of_K_V(partial(of_chunk, n)) for n in (8, 9))
    by_n = of_9 - of_8
    by_K, by_V = squared((9, 8), (8, 8)), squared((8, 9), (8, 8))
    return [of_K_V(of_token), by_n, of_8 - 8 * by_n, by_K, by_V]


@pytest.mark.parametrize("op", linattn.OPS)
def test_the_table_of_the_mathematics(op):
    page = Path(__file__).parents[1] / "docs" / "math.md"
    if not page.exists():
        pytest.skip("docs/math.md: not in a checkout")
    table = page.read_text().split("## 18. What is counted")[1]
    (row,) = re.findall(rf"^\| `{op}` \| (.*) \|$", table, re.M)
    found = largest_terms(op, "forward") + largest_terms(op, "backward")
    assert [float(x) for x in row.split(" | ")] == found


def test_nothing_costs_nothing():
    for op in (*linattn.OPS, "softmax"):
        for mode in ("chunk", "recurrent", "parallel"):
            assert linattn.flops(op, 0, K, V, mode=mode, passes="both") == 0


def test_an_op_whose_calls_all_give_x_counts_it_untold():
    for op in ops_with(rule="dplr"):
        for call in (linattn.memory, partial(linattn.flops, passes="both")):
            assert call(op, 9, K, V, HV=2, x=True) == call(op, 9, K, V, HV=2)


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


@EVERY_CALL
def test_memory_is_that_of_the_arrays(op, own_x):
    how = {"B": 2, "T": 6, "H": 2, "HV": 4, "K": 3, "V": 5, "dtype": np.float32, "x": own_x}
    x = make_inputs(op, np.random.default_rng(0), **how)
    o, state = getattr(linattn, op)(**x, output_final_state=True)
    of_state = sum(a.nbytes for a in (state if isinstance(state, tuple) else (state,)))
    got = linattn.memory(op, 6, 3, 5, B=2, H=2, HV=4, x=own_x)
    assert got.arrays == o.nbytes + sum(a.nbytes for a in x.values())
    assert got.kept == of_state and got.weights == 2 * 4 * 6 * 6 * 4
    softmax = linattn.memory("softmax", 6, 3, 5, B=2, H=2, HV=4, itemsize=2)
    assert softmax.kept == (x["k"].nbytes + x["v"].nbytes) // 2


@pytest.mark.parametrize(
    ("call", "bad", "error", "text"),
    [
        ("flops", {"op": "attention"}, ValueError, "op: expected one of linear_attention, "),
        ("flops", {"x": True}, ValueError, "x: expected False, for gla has no x, got True"),
        ("flops", {"x": 1}, TypeError, "x: expected a bool, got int"),
        ("memory", {"op": "softmax", "x": True}, ValueError, "x: expected False, for softmax has"),
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


@pytest.mark.parametrize("call", [linattn.flops, linattn.memory])
def test_a_system_is_no_op(call):
    for name in ("ssd", "gated_delta_product"):
        with pytest.raises(ValueError, match=f"got '{name}', a system: count the op that it calls"):
            call(name, 4, K, V)
    with pytest.raises(ValueError, match=r"or softmax, got 'attention'$"):
        call("attention", 4, K, V)
