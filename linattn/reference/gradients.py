"""The gradients of the ops: `backward` runs the adjoints of one head over sequences and heads."""

from typing import NamedTuple

import numpy as np

from ._loops import (
    OPS,
    SHARED_AXES,
    WITH_Z,
    cast,
    cast_keys,
    heads,
    keep_state,
    of_key,
    read_scale,
    rounded,
    rounded_like,
    state_arrays,
    state_axes,
    state_of,
    working,
)
from ._one_head import takes_one_head
from .adjoints import head_adjoint, normalised_head_adjoint
from .elements import GIVEN_AS, feature_adjoint, feature_pair, l2norm, l2norm_adjoint
from .momentum import in_batches, whole_batches

OF_OP = object()  # a scale that is not given; None is one that is


class Gradients(NamedTuple):
    """dg is the gradient of the gate as it was given: g, alpha, gamma or slopes.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x = np.ones((3, 2))  # one head: [T,K]
    >>> grads = reference.backward("delta_rule", x, x, x, x, beta=np.ones(3))
    >>> grads.dq.shape, grads.dbeta.shape, grads.dg is None
    ((3, 2), (3,), True)
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dg: np.ndarray | None
    dbeta: np.ndarray | None
    dx: np.ndarray | None
    dy: np.ndarray | None
    dbonus: np.ndarray | None
    deta: np.ndarray | None
    dvalue_gate: np.ndarray | None
    dweight: np.ndarray | None
    dskip: np.ndarray | None
    d_initial_state: np.ndarray | tuple | None


@takes_one_head
def backward(
    name,
    do,
    q,
    k,
    v,
    *,
    g=None,
    alpha=None,
    gamma=None,
    slopes=None,
    beta=None,
    x=None,
    y=None,
    bonus=None,
    eta=None,
    batch=1,
    feature_map="elu+1",
    normalize=True,
    causal=True,
    eps=1e-6,
    scale=OF_OP,
    initial_state=None,
    d_final_state=None,
    cu_seqlens=None,
    qk_l2norm=False,
    form="recurrent",
    chunk_size=64,
    dtype=np.float64,
):
    """The gradients of sum(do * o) + sum(d_final_state * final_state) for the op called `name`.

    An argument that was not given has the gradient None.

    Parameters
    ----------
    name : str
        The op's.
    do : array [B,T,HV,V]
        The gradient of o.
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    g, alpha, gamma, slopes, beta, x, y, bonus, eta, batch, feature_map, normalize, causal, eps
        As in the op.
    initial_state, d_final_state : array [N,HV,K,V], or a pair as the op has it, optional
    scale : float or None
        The factor of the read; the op's default by default.
    cu_seqlens, qk_l2norm, form, chunk_size, dtype
        The keywords at the head of :mod:`linattn.reference`.

    Returns
    -------
    Gradients

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn import reference
    >>> do, q, k, v = np.random.default_rng(0).standard_normal((4, 2, 6, 3, 4))  # [B,T,H,K]
    >>> gamma = np.array([0.9, 0.8, 0.7])
    >>> grads = reference.backward("retention", do, q, k, v, gamma=gamma)
    >>> np.allclose(grads.dg, linattn.retention_backward(do, q, k, v, gamma=gamma).dg)
    True
    """
    op, work = OPS[name], working(dtype)
    if batch != 1:
        op, chunk_size = in_batches(op, batch), whole_batches(chunk_size, batch)
    if not op.has_normaliser:
        feature_map, normalize = "identity", False
    do, v = cast(do, dtype), cast(v, dtype)
    q_in, k_in = (
        _Input(cast(x, dtype), phi, qk_l2norm)
        for x, phi in zip((q, k), feature_pair(feature_map), strict=True)
    )
    scale = read_scale(op.default_scale if scale is OF_OP else scale, q_in.given)
    q, k = q_in.mapped, k_in.mapped
    keyword, gate = _first_given(gamma=gamma, slopes=slopes, alpha=alpha, g=g)
    a = _decay(op, keyword, gate, v, work)
    a_keys = _by_key(op, a, v)
    by_value_head = {"beta": beta, "eta": eta}
    by_value_head = {n: cast(z, work) for n, z in by_value_head.items() if z is not None}
    by_key_head = {"q": q, "k": k, **cast_keys(dtype, x=x, y=y, bonus=bonus)}

    # those of query and key heads are summed over the value heads that share a head
    d = {name: np.zeros_like(z) for name, z in by_key_head.items()}
    d |= {name: np.empty_like(z) for name, z in by_value_head.items()}
    dv, da = np.empty_like(v), np.zeros((*v.shape[:3], q.shape[3]), work)
    axes = WITH_Z if op.has_normaliser else state_axes(op)
    states = state_arrays(initial_state, axes, q, v, cu_seqlens)
    d_states = state_arrays(d_final_state, axes, q, v, cu_seqlens)
    with np.errstate(all="ignore"):  # NaN and inf are data here
        for n, h, i, j in heads(q, v, cu_seqlens):
            C = _chunk_length(form, len(v[j]), chunk_size)
            state, d_state = state_of(states, n, h), state_of(d_states, n, h)
            if op.has_normaliser:
                dq_h, dk_h, dv[j], *d_state = normalised_head_adjoint(
                    op,
                    q[i],
                    k[i],
                    v[j],
                    state,
                    scale,
                    do[j],
                    d_state,
                    C,
                    causal,
                    normalize,
                    eps,
                )
                d_state, d_h = tuple(d_state), {"q": dq_h, "k": dk_h}
            else:
                given = {name: z[of_key(z, i)] for name, z in by_key_head.items()}
                given |= {name: z[j] for name, z in by_value_head.items()}
                given |= {"v": v[j], "a": a_keys[j]}
                adjoint = op.adjoint or head_adjoint
                d_h, d_state = adjoint(given, state, scale, do[j], d_state, C)
                dv[j], da_h = d_h["v"], d_h["a"]
                da[j][:, : da_h.shape[1]] = da_h
            keep_state(d_states, n, h, d_state)
            for name, z in by_key_head.items():
                d[name][of_key(z, i)] += d_h[name]
            for name in by_value_head:
                d[name][j] = d_h[name]
        d["q"], d["k"] = q_in.adjoint(d["q"]), k_in.adjoint(d["k"])
        dg = _gate_gradient(op, keyword, gate, a, da, work)

    def of_gate(name, given):
        return None if given is None else rounded_like(d[name], given, work)

    if normalize is False and op.has_normaliser:
        d_states = d_states[:1]
    return Gradients(
        rounded(d["q"], dtype),
        rounded(d["k"], dtype),
        rounded(dv, dtype),
        dg,
        of_gate("beta", beta),
        None if x is None else rounded(d["x"], dtype),
        None if y is None else rounded(d["y"], dtype),
        of_gate("bonus", bonus),
        of_gate("eta", eta),
        None,
        None,
        None,
        None if initial_state is None else d_states[0] if len(d_states) == 1 else d_states,
    )


class _Input:
    """q or k on its way into an op: the norm, then the feature map."""

    def __init__(self, given, phi, qk_l2norm):
        self.given, self.phi, self.qk_l2norm = given, phi, qk_l2norm
        self.normed = l2norm(given) if qk_l2norm else given
        self.mapped = phi(self.normed)

    def adjoint(self, dy):
        """The gradient of what was given, from that of what the op saw."""
        dy = feature_adjoint(self.phi, self.normed, self.mapped, dy)
        return l2norm_adjoint(self.given, dy) if self.qk_l2norm else dy


def _first_given(**gates):
    """The keyword that gives the decay, and its value; None twice if none does."""
    return next(((keyword, x) for keyword, x in gates.items() if x is not None), (None, None))


def _decay(op, keyword, gate, v, work):
    """a in the shape in which a decay is given: [HV], [B,T,HV] or [B,T,HV,K]; 1 without one."""
    if op.decay == "none":
        return np.ones(1, work)
    if gate is None:
        return cast(op.default_decay(v), work)
    to_decay, _ = GIVEN_AS[keyword]
    return to_decay(cast(gate, work))


def _by_key(op, a, v):
    """a as [B,T,HV,K], or as [B,T,HV,1] if all keys have one decay."""
    a = a if op.decay == "key" else a[..., None]
    return np.broadcast_to(a, (*v.shape[:3], a.shape[-1]))


def _gate_gradient(op, keyword, gate, a, da, work):
    """The gradient of the gate as it was given, from da [B,T,HV,K]."""
    if gate is None:
        return None
    if shared := SHARED_AXES[op.decay]:
        da = da.sum(shared)
    _, to_gradient = GIVEN_AS[keyword]
    return rounded_like(to_gradient(a, da), gate, work)


def _chunk_length(form, T, chunk_size):
    """C of a form for T tokens, None token by token. A chunk has at least one token."""
    if form == "recurrent":
        return None
    return (T if form == "parallel" else chunk_size) or 1
