"""Functions of single elements and rows, each beside its derivative or its adjoint.

The l2 norm and the feature maps of q and k, the divisor of a normalised op, and the ways to give
a decay.
"""

import numpy as np

# ---------------------------------------------------------------------------------------------
# q and k, before an op sees them.
# ---------------------------------------------------------------------------------------------


def l2norm(x):
    """r x, with r = (sum x^2 + 1e-6)^(-1/2) over the last axis.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> reference.l2norm(np.array([3.0, 4.0])).round(6)
    array([0.6, 0.8])
    """
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(1e-6))


def l2norm_adjoint(x, dy):
    """dx of y = l2norm(x): dr/dx = -r^2 y."""
    r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(1e-6))
    y = r * x
    return r * (dy - y * (y * dy).sum(-1, keepdims=True))


# exp never gets an argument that overflows: elu+1 is exp(x) below 0, not expm1(x) + 1, which is
# exactly 0 in float32 from about -17.5 on.

#: Of each name: phi, and phi' written with x and y = phi(x).
FEATURE_MAPS = {
    "elu+1": (
        lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        lambda x, y: np.where(x > 0, np.ones_like(y), y),
    ),
    "relu+eps": (
        lambda x: np.maximum(x, 0) + x.dtype.type(1e-3),
        lambda x, y: (x > 0).astype(x.dtype),
    ),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x, y: 2 * np.maximum(x, 0)),
    "exp": (np.exp, lambda x, y: y),
    "identity": (lambda x: x, lambda x, y: np.ones_like(x)),
}


def feature_pair(feature_map):
    """phi of q and phi of k, from a name, a callable, or a pair of them."""
    pair = feature_map if isinstance(feature_map, (tuple, list)) else (feature_map, feature_map)
    return tuple(FEATURE_MAPS[phi][0] if isinstance(phi, str) else phi for phi in pair)


def feature_adjoint(phi, x, y, dy):
    """dx of y = phi(x). A callable without a known derivative is differentiated numerically."""
    for known, derivative in FEATURE_MAPS.values():
        if phi is known:
            return derivative(x, y) * dy
    dx = np.empty_like(x)
    step = 1e-6
    for c in range(x.shape[-1]):
        up, down = x.astype(np.float64), x.astype(np.float64)
        up[..., c] += step
        down[..., c] -= step
        dx[..., c] = (dy * (phi(up) - phi(down)) / (2 * step)).sum(-1)
    return dx


# ---------------------------------------------------------------------------------------------
# The divisor of linear_attention.
# ---------------------------------------------------------------------------------------------


def divisor(den, normalize, eps):
    """m = den + eps for normalize="add", else max(den, eps)."""
    eps = den.dtype.type(eps)
    return den + eps if normalize == "add" else np.maximum(den, eps)


def divide_adjoint(do, num, den, normalize, eps):
    """dnum and dden of o = num / m, m as `divisor` has it. A clamped row has no dden."""
    if normalize is False:
        return do, np.zeros_like(den)
    m = divisor(den, normalize, eps)
    dden = -(do * num).sum(-1) / (m * m)
    return do / m[:, None], dden if normalize == "add" else np.where(den > eps, dden, 0)


# ---------------------------------------------------------------------------------------------
# The decay a.
# ---------------------------------------------------------------------------------------------

# The keyword that gives a decay -> a, from what was given; and the gradient of what was given,
# from a and da. With a = 0 the gradient of g is 0 and not NaN.
GIVEN_AS = {
    "gamma": (lambda gamma: gamma, lambda a, da: da),
    "slopes": (lambda slopes: np.exp(-slopes), lambda a, da: -a * da),
    "alpha": (lambda alpha: alpha, lambda a, da: da),
    "g": (np.exp, lambda a, da: a * da),
}


def retnet_gamma(v):
    """RetNet's decay [HV], 1 - 2^(-5-h) for head h of v [B,T,HV,V]."""
    return 1 - 2.0 ** (-5 - np.arange(v.shape[2]))
