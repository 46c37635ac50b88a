"""Feature maps with another number of features than keys: random ones (FAVOR+), and products.

They run before the kernels, on the caller's own arrays: NumPy's, PyTorch's, CuPy's. The number of
features is the K of the states.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from linattn.arrays import as_int, as_size
from linattn.features import (
    FeatureMap,
    cast,
    finite_eps,
    is_tensor,
    is_traced,
    library_of,
    shape_of,
    wide,
)

__all__ = ["RandomFeatureMap", "dpfp", "favor"]

_KERNELS = ("softmax", "relu")


def favor(
    num_features: int,
    *,
    dim: int,
    seed: int = 0,
    orthogonal: bool = True,
    kernel: str = "softmax",
    eps: float = 0.0,
) -> RandomFeatureMap:
    """Performer's positive random features (FAVOR+), an estimate of softmax attention.

    ::

        softmax  phi(x) = (exp(W y - |y|^2 / 2) + eps) / sqrt(m)     y = x K^(-1/4)
        relu     phi(x) = (max(W y, 0) + eps) / sqrt(m)

    The mean of phi(q) . phi(k) over W is exp(q . k / sqrt(K)), softmax's weight. Use it as the
    feature map of a normalised :func:`linear_attention`.

    Parameters
    ----------
    num_features : int
        m, the rows of W. A state is then [N,HV,m,V].
    dim : int
        K, the last axis of q and k.
    seed : int
        Of W. NumPy draws it in float64 (Philox), for the arrays of every library.
    orthogonal : bool
        Blocks of K rows are orthogonal, and as long as rows of normal numbers are. The estimate is
        still right on average, and varies less. False: independent rows.
    kernel : {"softmax", "relu"}
        ``"relu"`` estimates another kernel than softmax's, without an exponential.
    eps : float
        Is added to every feature. Performer's code has 1e-4, which moves the weights of all tokens
        towards each other; the ``eps`` of :func:`linear_attention` does without that.

    Returns
    -------
    RandomFeatureMap
        A :class:`FeatureMap` with ``backward``. Its ``projection`` is W, and ``redraw(seed)`` gives
        another map.

    Raises
    ------
    TypeError
        A size or the seed is no int, ``orthogonal`` no bool, or ``eps`` no number.
    ValueError
        A size is below 1, the seed is negative, there is no such kernel, or ``eps`` is negative or
        not finite. A call raises it if K is not ``dim``.

    Notes
    -----
    How close it is: the table has the mean of abs(o - o_softmax), over 20 draws of W, for 64 tokens
    with causal attention and normal values. o_softmax has a standard deviation of about 0.3. The
    last column is the error of an estimate without q and k, the mean of the values so far.

    ===================  ======  ======  =======  ========  ====================
    rows of q and k      m = 16  m = 64  m = 256  m = 1024  mean of the values
    ===================  ======  ======  =======  ========  ====================
    normal, K = 16       0.23    0.20    0.16     0.13      0.16
    normal, K = 64       0.37    0.33    0.28     0.25      0.17
    unit norm, K = 16    0.019   0.010   0.005    0.003     0.009
    unit norm, K = 64    0.016   0.007   0.003    0.002     0.002
    ===================  ======  ======  =======  ========  ====================

    So it is close to softmax for short q and k, whose softmax is nearly flat. For rows of normal
    numbers it needs m far above K to be closer than the mean of the values. A model that is trained
    with these features need not be close to softmax.

    No maximum is taken out of the exponent. A maximum over each key, or over the keys so far, would
    change the weights. A feature is below exp(norm(w)^2 / 2), with w a row of W, which is about
    exp(K / 2). float32 ends at exp(88). A long q has small features: where norm(q) is above
    5 K^(1/4), pass :func:`linear_attention` a small ``eps``, such as 1e-30, that does not replace
    its denominators.

    Features of float16 and bfloat16 arrays are computed in float32. Then they are rounded to the
    dtype of x, because q, k and v of a call have one dtype. float16 ends at exp(11): cast q, k and
    v to float32 or bfloat16 first, unless they are short.

    References
    ----------
    Choromanski et al., 2020, *Rethinking Attention with Performers*, arXiv:2009.14794.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> phi = linattn.favor(256, dim=8)
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 20, 8)) / 2  # one head: [T,K]
    >>> o, _ = linattn.linear_attention(q, k, v, feature_map=phi)
    >>> bool(abs(o - linattn.reference.softmax_attention(q, k, v)).mean() < 0.02)
    True
    >>> phi.projection.shape
    (256, 8)
    """
    return RandomFeatureMap(
        num_features, dim=dim, seed=seed, orthogonal=orthogonal, kernel=kernel, eps=eps
    )


class RandomFeatureMap(FeatureMap):
    """The feature map that :func:`favor` makes. It owns its projection W.

    Parameters
    ----------
    num_features, dim, seed, orthogonal, kernel, eps
        See :func:`favor`.

    Attributes
    ----------
    projection : ndarray [m,K], float64, read-only
        W.

    See Also
    --------
    favor : Makes one.

    Examples
    --------
    The same seed is the same W. ``redraw`` is for another one, as Performer has during training:

    >>> import numpy as np, linattn
    >>> phi = linattn.favor(32, dim=8, seed=1)
    >>> phi
    favor(32, dim=8, seed=1)
    >>> np.array_equal(phi.projection, linattn.favor(32, dim=8, seed=1).projection)
    True
    >>> phi.redraw(2)
    favor(32, dim=8, seed=2)
    """

    def __init__(
        self,
        num_features: int,
        *,
        dim: int,
        seed: int = 0,
        orthogonal: bool = True,
        kernel: str = "softmax",
        eps: float = 0.0,
    ) -> None:
        m, K = as_size("num_features", num_features, 1), as_size("dim", dim, 1)
        seed = as_int("seed", seed)
        if seed < 0:
            raise ValueError(f"seed: expected an int >= 0, got {seed}")
        if not isinstance(orthogonal, bool | np.bool_):
            raise TypeError(f"orthogonal: expected True or False, got {type(orthogonal).__name__}")
        if kernel not in _KERNELS:
            raise ValueError(
                f"kernel: expected one of {', '.join(map(repr, _KERNELS))}, got {kernel!r}"
            )
        small = finite_eps(eps)
        phi = _RandomFeatures(_projection(m, K, seed, bool(orthogonal)), kernel, small)
        super().__init__("favor", small, phi, phi.backward)
        options = {"seed": seed, "orthogonal": bool(orthogonal), "kernel": kernel}
        object.__setattr__(self, "_options", options)

    @property
    def projection(self) -> np.ndarray:
        phi: _RandomFeatures = self.__dict__["forward"]
        return phi.W

    def redraw(self, seed: int) -> RandomFeatureMap:
        """The map with the same options and another W.

        Parameters
        ----------
        seed : int
            Of the new W.

        Returns
        -------
        RandomFeatureMap
        """
        m, K = self.projection.shape
        return RandomFeatureMap(m, dim=K, eps=self.eps, **{**self._given(), "seed": seed})

    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = self.__dict__["_options"]
        return given

    def __repr__(self) -> str:
        m, K = self.projection.shape
        given = self._given()
        shown = [f"{m}", f"dim={K}", f"seed={given['seed']}"]
        shown += ["orthogonal=False"] if not given["orthogonal"] else []
        shown += [f"kernel={given['kernel']!r}"] if given["kernel"] != "softmax" else []
        shown += [f"eps={self.eps}"] if self.eps else []
        return f"favor({', '.join(shown)})"


def _projection(m: int, K: int, seed: int, orthogonal: bool) -> np.ndarray:
    """W [m,K], float64 and read-only. Each row is as a row of normal numbers is, by itself."""
    rng = np.random.Generator(np.random.Philox(seed))
    blocks = [_orthogonal(rng, K) for _ in range(0, m, K)] if orthogonal else []
    W = np.concatenate(blocks)[:m] if orthogonal else rng.standard_normal((m, K))
    W = np.ascontiguousarray(W)
    W.flags.writeable = False
    return W


def _orthogonal(rng: np.random.Generator, K: int) -> np.ndarray:
    """K orthogonal rows. Signs make QR's basis uniform; the lengths are those of normal rows."""
    Q, R = np.linalg.qr(rng.standard_normal((K, K)))
    lengths = np.linalg.norm(rng.standard_normal((K, K)), axis=1)
    rows: np.ndarray = lengths[:, None] * (Q * np.where(np.diag(R) < 0, -1, 1)).T
    return rows


class _RandomFeatures:
    """phi of :func:`favor` and its adjoint. M is W scaled, so that one product is left::

        softmax  phi(x) = exp(x M' - s^2 |x|^2 / 2 - log(m) / 2) + offset     M = s W
        relu     phi(x) = max(x M', 0) + offset                               M = s W / sqrt(m)

    with s = K^(-1/4) and offset = eps / sqrt(m).
    """

    def __init__(self, W: np.ndarray, kernel: str, eps: float) -> None:
        m, K = W.shape
        self.W, self.kernel, self.s = W, kernel, K**-0.25
        self.M = self.s * W / (1 if kernel == "softmax" else math.sqrt(m))
        self.log_norm, self.offset = math.log(m) / 2, eps / math.sqrt(m)
        self.kept: dict[tuple[str, str, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": {}}

    def __call__(self, x: Any) -> Any:
        y, M = self._taken(x)
        with _exactly(y):
            phi = self._phi(y, M)
            return cast(phi + self.offset if self.offset else phi, x.dtype)

    def backward(self, x: Any, dy: Any) -> Any:
        """was phi(x): for softmax dx = (phi * dy) M - s^2 x sum(phi * dy)."""
        y, M = self._taken(x)
        with _exactly(y):
            phi = self._phi(y, M)
            if self.kernel == "relu":
                return cast(_rows_times(wide(dy) * (phi > 0), M), x.dtype)
            g = phi * wide(dy)
            dx = _rows_times(g, M) - self.s**2 * y * g.sum(-1, keepdims=True)
            return cast(dx, x.dtype)

    def _phi(self, x: Any, M: Any) -> Any:
        u = _rows_times(x, M.T)
        if self.kernel == "relu":
            return u.clip(0, None)
        u = u - (self.s**2 / 2 * (x * x).sum(-1, keepdims=True) + self.log_norm)
        return library_of(x).exp(u)

    def _taken(self, x: Any) -> tuple[Any, Any]:
        """x in float32 or better, and M like it."""
        shape, K = shape_of(x), self.M.shape[1]
        if not shape or shape[-1] != K:
            got = type(x).__name__ if shape is None else tuple(shape)
            raise ValueError(
                f"feature_map: expected q and k [...,dim] with favor's dim = {K}, got {got}"
            )
        x = wide(x)
        if is_traced(x):
            return x, _like(self.M, x)
        key = (type(x).__module__, str(getattr(x, "device", "cpu")), str(x.dtype))
        if key in self.kept:
            return x, self.kept[key]
        M = _like(self.M, x)
        # a tensor of a transform, of inference mode or without memory is not for other calls
        if not is_tensor(M) or (type(M).__name__ == "Tensor" and not M.is_inference()):
            self.kept[key] = M
        return x, M


def _like(M: np.ndarray, x: Any) -> Any:
    """M as an array of x's library, where x lies, in x's dtype."""
    library = library_of(x)
    if is_tensor(x):
        return library.as_tensor(M, dtype=x.dtype, device=x.device)
    return library.asarray(M, dtype=x.dtype)


def _rows_times(x: Any, M: Any) -> Any:
    """x [...,a] times M [a,b], as one product: NumPy would make one of each matrix in x."""
    if is_tensor(x):
        return x @ M
    return (x.reshape(-1, M.shape[0]) @ M).reshape(*x.shape[:-1], M.shape[1])


def _exactly(x: Any) -> Any:
    """No autocast: in bfloat16 an exponent of 50 is off by 0.1. No warning where inf is right."""
    if not is_tensor(x):
        return np.errstate(over="ignore")
    device, torch = x.device.type, library_of(x)
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def dpfp(nu: int = 1) -> FeatureMap:
    """Deterministic parameter-free projection: products of two entries of (max(x, 0), max(-x, 0)).

    ::

        r = (max(x, 0), max(-x, 0))                          [2 K]
        phi(x)[(j - 1) 2 K + i] = r[i] r[(i - j) mod 2 K]    j = 1 ... nu

    A row of K numbers has 2 K nu features. Most of them are zero, and which ones depends on x: that
    makes room for more keys that do not disturb each other.

    Parameters
    ----------
    nu : int
        From 1 to 2 K - 1.

    Returns
    -------
    FeatureMap
        With ``backward``.

    Raises
    ------
    TypeError
        ``nu`` is no int.
    ValueError
        ``nu`` is below 1. A call raises it if ``nu`` is above 2 K - 1.

    Notes
    -----
    float16 and bfloat16 arrays are computed in float32 and rounded once. A product of two numbers
    above 255 is infinite in float16. Features may all be zero. With a normaliser the output is zero
    then.

    References
    ----------
    Schlag et al., 2021, *Linear Transformers Are Secretly Fast Weight Programmers*,
    arXiv:2102.11174.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> linattn.apply_feature_map(np.array([2.0, -3.0]), linattn.dpfp())  # r = 2, 0, 0, 3
    array([6., 0., 0., 0.])
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 8))  # one head: [T,K]
    >>> _, (S, z) = linattn.linear_attention(
    ...     q, k, v, feature_map=linattn.dpfp(nu=3), output_final_state=True
    ... )
    >>> S.shape
    (48, 8)
    """
    phi = _Products(as_size("nu", nu, 1))
    return FeatureMap(f"dpfp(nu={phi.nu})", forward=phi, backward=phi.backward)


class _Products:
    """phi of :func:`dpfp` and its adjoint."""

    def __init__(self, nu: int) -> None:
        self.nu, self.__name__ = nu, "dpfp"

    def __call__(self, x: Any) -> Any:
        r = self._signs_apart(wide(x))
        with _exactly(r):
            parts = [r * _rolled(r, j) for j in range(1, self.nu + 1)]
            return cast(library_of(x).concatenate(parts, -1), x.dtype)

    def backward(self, x: Any, dy: Any) -> Any:
        """was r_i r_{i-j}: both factors get the other times dy, then the signs come together."""
        y, dy = wide(x), wide(dy)
        r = self._signs_apart(y)
        n, dr = r.shape[-1], None
        for j in range(1, self.nu + 1):
            d = dy[..., (j - 1) * n : j * n]
            of_both = d * _rolled(r, j) + _rolled(d * r, -j)
            dr = of_both if dr is None else dr + of_both
        assert dr is not None
        K = y.shape[-1]
        return cast((y > 0) * dr[..., :K] - (y < 0) * dr[..., K:], x.dtype)

    def _signs_apart(self, x: Any) -> Any:
        if self.nu > 2 * x.shape[-1] - 1:
            raise ValueError(
                f"feature_map: expected q and k [...,K] with 2 K > nu = {self.nu} for dpfp, "
                f"got {tuple(x.shape)}"
            )
        return library_of(x).concatenate([x.clip(0, None), (-x).clip(0, None)], -1)


def _rolled(x: Any, j: int) -> Any:
    """Entry i is entry i - j of x."""
    return library_of(x).concatenate([x[..., -j:], x[..., :-j]], -1)
