"""Operations of the ops with keys of their own, other orders or two states, for cost.py.

The sums are those of section 16 of docs/math.md. The numbers are those of one value head, unless
they say otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COUNTS", "Counts"]


class Counts(NamedTuple):
    """What cost.py asks of a rule. K, V: sizes; n: tokens of a chunk."""

    token_written: int  # of a token: all that leads to its states
    token_read: int
    token_adjoint: int
    scored: int  # of a chunk: the scores of one value head, apart from what heads share
    shared: int  # the same for all value heads that share a head of keys
    carried: int  # all that leads to its writes and states
    state_carried: int  # the part of it that makes the states of its end
    read: int
    adjoint: int
    sums: int  # of a token: dq, dk and the like, for a value head that shares a head of keys


def _pairs(n: int) -> tuple[int, int]:
    return n * (n + 1) // 2, n * (n - 1) // 2


def dplr(K: int, V: int, n: int) -> Counts:
    seen, before = _pairs(n)
    state_carried = K * V + 2 * n * 2 * K * V  # two rows for each token
    adjoint = n * V  # dO
    adjoint += 2 * (n * 2 * K * V + seen * 2 * V)  # dV and dp of carry and read
    adjoint += 2 * seen * 2 * V + 2 * n * 2 * K * V + 2 * K * V  # dPk, dPy; dk~, dy~; de_n
    adjoint += before * 2 * V + before * 2 * V + 2 * before * 2 * V  # dp; dV; dLk, dLy
    adjoint += 2 * n * 2 * K * V + K * V + 2 * n * 2 * K * V  # dq^, dx^; dS
    adjoint += 2 * n * 2 * K  # dq and dx through e
    adjoint += n * 2 * K + (n - 1) * 2 * K  # de
    adjoint += n * K + (n - 1) * 2 * K  # da of e, and up the recursion of e
    adjoint += 2 * before * K  # keys, faded on once more
    adjoint += 2 * before * 11 * K  # d of q, of x; dq, dx; da; d
    adjoint += 2 * n * 5 * K  # the diagonal
    return Counts(
        token_written=2 * K * V + K * V + 4 * K * V,  # look, decay, two writes
        token_read=2 * K * V + V,
        token_adjoint=V + 19 * K * V,
        scored=2 * seen * 2 * K + 2 * before * 2 * K,
        shared=0,
        # keys, faded on; e, q^, x^; the look
        carried=2 * before * K + 3 * n * K + n * 2 * K * V + before * 4 * V + state_carried,
        state_carried=state_carried,
        read=n * 2 * K * V + seen * 4 * V + n * V,
        adjoint=adjoint,
        sums=4 * K,
    )


def bonus(K: int, V: int, n: int) -> Counts:
    _, before = _pairs(n)
    state_carried = K * V + n * 2 * K * V
    adjoint = n * V  # dO
    adjoint += n * 2 * K * V + before * 2 * V + n * 2 * V  # dV, of the own write too
    adjoint += before * 2 * V + n * 2 * V  # dP; v . dO
    adjoint += n * 2 * K * V + 2 * K * V + n * 2 * K * V  # dk~, de_n, dq^
    adjoint += K * V + n * 2 * K * V  # dS
    adjoint += n * 2 * K + (n - 1) * 2 * K  # dq through e; de
    adjoint += n * K + (n - 1) * 2 * K  # da of e, and up the recursion of e
    adjoint += before * K + before * 7 * K  # keys, faded once more; d, dq, da
    adjoint += n * K + n * 8 * K  # dk; the own write
    return Counts(
        token_written=K * V + 2 * K * V,
        token_read=2 * K * V + 3 * K + 3 * V,  # the state, q . (u * k), its product, scale
        token_adjoint=11 * K * V + 5 * V + 11 * K,
        scored=before * 2 * K,
        shared=n * 3 * K,  # q . (u * k)
        carried=before * K + 2 * n * K + state_carried,
        state_carried=state_carried,
        read=n * 2 * K * V + before * 2 * V + n * 2 * V + n * V,
        adjoint=adjoint,
        sums=2 * K,
    )


def pair(K: int, V: int, n: int) -> Counts:
    (seen, before), apart = _pairs(n), _pairs(n - 1)[1]  # apart: j < i - 1
    state_carried = 4 * K * V + 2 * n * 2 * K * V
    adjoint = n * V  # dO
    adjoint += 2 * n * 2 * K * V + n * 3 * V + seen * 2 * V  # k dM, k dY; dU
    adjoint += seen * 2 * V  # dP
    adjoint += 3 * 2 * K * V + 2 * n * 2 * V  # de_n, df_n, dm_n; dG_n, dN_n
    adjoint += 2 * n * 2 * K * V + 2 * n * 2 * V  # q M, q Y once more; de, df of the read
    adjoint += 2 * n * 2 * K * V + n * 3 * K  # dq of the states
    adjoint += before * 2 * V + n * V + n * 2 * V + before * 2 * V  # dU; dE; dbeta; dL
    adjoint += 2 * n * 2 * V  # de, df of the prediction
    adjoint += 4 * n * 2 * K * V + n * 7 * K  # dk of the states
    adjoint += 4 * K * V + 4 * n * 2 * K * V + 4 * n * K  # dM, dY
    adjoint += 2 * before + before * 2 + apart * 2  # dqk, dkk; dG
    adjoint += 2 * seen * 2 * K + before * 4 * K  # dq, dk of the scores
    adjoint += n * 3 + before * 2 + before + n  # da; dN, dm
    adjoint += n + before * 2 + (n - 1) * 6 + apart * 4  # deta; up the recursions
    return Counts(
        token_written=2 * K * V + 2 * V + 3 * K * V + 2 * K * V,  # predict, write, carry
        token_read=2 * K * V + V,
        token_adjoint=19 * K * V + 4 * V,
        scored=0,
        shared=seen * 2 * K + before * 2 * K,
        # m, e, f; N, G; P and L; k~ twice; the prediction
        carried=4 * n
        + before * 3
        + before * 2
        + (n - 1) * 2 * K
        + 2 * n * 2 * K * V
        + n * 5 * V
        + before * 2 * V
        + state_carried,
        state_carried=state_carried,
        read=2 * n * 2 * K * V + n * 3 * V + seen * 2 * V + n * V,
        adjoint=adjoint,
        sums=2 * K,
    )


#: By rule, or by the decay of two states.
COUNTS = {"dplr": dplr, "bonus": bonus, "pair": pair}
