"""The acceptance rule and the random problems that every test uses, on every device."""

import inspect
from typing import Any

import numpy as np

from linattn import _linattn, ops
from linattn.variants import ARRAYS, OPS, VARIANTS, ArrayLine

__all__ = [
    "GATES",
    "RMS_BOUND",
    "RMS_BOUND_TF32",
    "assert_accurate",
    "make_inputs",
    "make_output_gradients",
]

# r, the bound on rms(out - ref64) / rms(ref64). A correct result rounded once is off by at most
# half a unit in the last place: 2e-3 in bfloat16, 2.4e-4 in float16. float32 and float64 have the
# roundings of long sums on top.
#: By dtype, the bound on rms(out - ref64) / rms(ref64).
RMS_BOUND = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 8e-3, "float16": 2e-3}
#: The bound of float32 where TF32 is allowed.
RMS_BOUND_TF32 = 1e-3


def assert_accurate(
    out: Any,
    ref64: Any,
    naive: Any,
    *,
    dtype: Any,
    gradient: bool = False,
    tf32: bool = False,
    name: str = "",
) -> None:
    """Raise AssertionError unless `out` is as good as plain NumPy at `dtype` would be.

    Parameters
    ----------
    out : array
        The result under test.
    ref64 : array, shape of out
        linattn.reference in float64 (np.longdouble when dtype is float64: see below).
    naive : array, shape of out
        linattn.reference with dtype=dtype: the same algorithm, its rounding errors included.
    dtype : dtype
        float64, float32, float16 or bfloat16: that of the inputs.
    gradient : bool
        Is `out` a gradient? The bound r is then twice as large.
    tf32 : bool
        May operands have been rounded as tf32's are? Only for float32.
    name : str
        Of the result, for the message.

    Raises
    ------
    AssertionError
        One of the rules does not hold. The message has the figures.

    Notes
    -----
    All of these must hold:

    1. out, ref64 and naive have one shape; out is finite, +inf, -inf and NaN where ref64, as
       dtype holds it, is; naive is finite where ref64 is, since it cannot be a yardstick else;
    2. ``max|out - ref64| <= 2 max|naive - ref64| + 2 max|(ref64 + 0.3 - 0.3 at dtype) - ref64|``;
    3. rms(out - ref64) / rms(ref64) < r, unless ref64 is zero everywhere: then 2 alone decides,
       and it asks for what naive got, usually exact zeros.

    r is float64 1e-12, float32 2e-6 (tf32 1e-3), bfloat16 8e-3, float16 2e-3; twice that for a
    gradient. The second term of 2 keeps the bound off zero where naive happens to be exact.

    For float64 the naive twin must not be ref64 itself, or rule 2 asks for the same bits: take
    ref64 with dtype=np.longdouble, or naive in another form (form="chunk").

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn import reference
    >>> from linattn.testing import assert_accurate, make_inputs
    >>> x = make_inputs("kda", np.random.default_rng(0), T=100, dtype=np.float32)
    >>> o, _ = linattn.kda(**x)
    >>> (ref64, _), (naive, _) = reference.kda(**x), reference.kda(**x, dtype=np.float32)
    >>> assert_accurate(o, ref64, naive, dtype=np.float32)
    >>> assert_accurate(o + 1e-4, ref64, naive, dtype=np.float32)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: not accurate for float32, shape (1, 100, 1, 4)
    ...
    """
    dtype = np.dtype(dtype)
    out, ref64, naive = np.asarray(out), np.asarray(ref64), np.asarray(naive)
    label = f"{name}: " if name else ""
    if not out.shape == ref64.shape == naive.shape:
        raise AssertionError(
            f"{label}shapes differ: out {out.shape}, ref64 {ref64.shape}, naive {naive.shape}"
        )
    wide = np.result_type(np.float64, ref64.dtype)
    with np.errstate(all="ignore"):
        held = ref64.astype(dtype)  # 1e39 is inf in float32, rightly
        rounded = _around_0_3(held, tf32 and dtype == np.float32)
    out, ref64, naive, held, rounded = (x.astype(wide) for x in (out, ref64, naive, held, rounded))

    problems = []
    for what, is_so in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = is_so(out) != is_so(held)
        if wrong.any():
            problems.append(
                f"{what}: {is_so(out).sum()} in out, {is_so(held).sum()} in ref64, first "
                f"difference at {_index(wrong)}"
            )
    finite = np.isfinite(held)
    if not np.isfinite(naive[finite]).all():
        problems.append(
            f"naive is not finite at {_index(finite & ~np.isfinite(naive))}, where ref64 is"
        )

    # what is not finite in out is already in problems; leave it out of the figures
    both = finite & np.isfinite(out)
    error, size = out[both] - ref64[both], ref64[both]
    worst = _largest(error)
    bound_naive = _largest_error(naive, ref64, finite)
    bound_rounding = _largest_error(rounded, ref64, finite)
    bound = 2 * bound_naive + 2 * bound_rounding
    if not worst <= bound:
        where = tuple(int(i) for i in np.argwhere(both)[np.argmax(np.abs(error))])
        problems.append(
            f"max|out - ref64| = {worst:.3e} > {bound:.3e} = 2 * {bound_naive:.3e} (naive) "
            f"+ 2 * {bound_rounding:.3e} (rounding), at {where}: "
            f"out {out[where]!r}, ref64 {ref64[where]!r}"
        )

    r = RMS_BOUND_TF32 if tf32 and dtype == np.float32 else RMS_BOUND[dtype.name]
    r = 2 * r if gradient else r
    rms_error, rms_ref = _rms(error), _rms(size)
    if rms_ref > 0 and not rms_error / rms_ref < r:
        problems.append(
            f"rms(out - ref64) / rms(ref64) = {rms_error:.3e} / {rms_ref:.3e} = "
            f"{rms_error / rms_ref:.3e}, not < {r:.1e}"
        )

    if problems:
        raise AssertionError(
            f"{label}not accurate for {dtype.name}, shape {out.shape}\n  " + "\n  ".join(problems)
        )


def _around_0_3(x, tf32):
    """x + 0.3 - 0.3, rounded to x's dtype (or to tf32's 10 bits of fraction) each time."""
    if not tf32:
        three_tenths = x.dtype.type(0.3)
        return (x + three_tenths) - three_tenths
    three_tenths = _to_tf32(np.float32(0.3))
    return _to_tf32(_to_tf32(_to_tf32(x) + three_tenths) - three_tenths)


def _to_tf32(x):
    """float32 with its last 13 of 23 bits of fraction rounded away, half up in magnitude."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def _largest(x):
    return np.abs(x).max(initial=0)


def _largest_error(x, ref64, where):
    where = where & np.isfinite(x)
    return _largest(x[where] - ref64[where])


def _rms(x):
    """Scaled by the largest element, so that squares neither overflow nor vanish."""
    largest = _largest(x)
    return largest * np.sqrt(np.mean((x / largest) ** 2)) if largest > 0 else largest


def _index(mask):
    return tuple(int(i) for i in np.argwhere(mask)[0])


def _keyword(op: str, line: ArrayLine) -> str:
    """The table does not say how a decay per head is given. The op's signature does."""
    names = ("g", "gamma", "slopes") if line.part_of == "DECAY" else (line.label,)
    given = inspect.signature(getattr(ops, op)).parameters
    return next(name for name in names if name in given)


def _letters(op: str) -> dict[str, str]:
    """By keyword: the letters of the arrays that a problem of this op has. Without them no forward
    call is legal, or the op has lost a part that no other op has: a momentum."""

    def is_drawn(line: ArrayLine) -> bool:
        return line.is_needed_by(VARIANTS[op]) or line.part_of == "PAIR"

    lines = [line for line in ARRAYS if line.gradient is not None and line.role != "OUTPUT"]
    given = {line.label: True for line in lines if line.label != "q"}
    rows = _linattn.shapes("backward", op, q=4, **given)  # a gradient has its array's letters
    return {
        _keyword(op, line): row[0]
        for line, row in zip(lines, rows, strict=True)
        if row is not None and line.role == "INPUT" and is_drawn(line)
    }


_LETTERS = {op: _letters(op) for op in OPS}
#: By op, the keywords of its arrays beside q, k and v: gates, and those of some rules.
GATES = {op: tuple(name for name in names if name not in "qkv") for op, names in _LETTERS.items()}

# How an array's numbers are drawn, by its keyword; about normal, if it is not here.
_NUMBERS: dict[str, Any] = {
    "g": lambda rng, shape: np.maximum(-np.logaddexp(0, rng.standard_normal(shape)), -3),
    "gamma": lambda rng, shape: rng.uniform(0.5, 1, shape),
    "slopes": lambda rng, shape: rng.uniform(0, 1, shape),
    "beta": lambda rng, shape: rng.uniform(0.02, 0.98, shape),
    "eta": lambda rng, shape: rng.uniform(0, 0.9, shape),
}


def _numbers(op: str, rng: Any, name: str, shape: tuple[int, ...], drawn: dict[str, Any]) -> Any:
    """drawn: the arrays before it."""
    if name in _NUMBERS:
        return _NUMBERS[name](rng, shape)
    if name == "y":
        return _near(rng, drawn["x"])
    numbers = rng.standard_normal(shape)
    if name == "x" or (name == "k" and VARIANTS[op].rule == "delta"):
        numbers /= np.sqrt((numbers * numbers).sum(-1, keepdims=True) + 1e-2)
    return numbers


def _near(rng: Any, keys: Any) -> Any:
    """Keys y for which I - y x' shrinks more than it stretches, x being of about unit norm: a part
    of x, and a tenth of something else."""
    other = rng.standard_normal(keys.shape) / max(1, keys.shape[-1]) ** 0.5
    return rng.uniform(0, 1, (*keys.shape[:-1], 1)) * keys + other / 10


def make_inputs(
    op,
    rng,
    B=1,
    T=8,
    H=1,
    HV=None,
    K=4,
    V=4,
    dtype=np.float64,
    *,
    initial_state=False,
    cu_seqlens=None,
    normalize=True,
    x=False,
):
    """A legal random problem: a dict of arrays to call linattn's, or the reference's, op with.

    q, k, v and bonus are about normal; a delta rule's keys and every x have about unit norm, so
    that a solve is well conditioned; y lies near x; g = -softplus(normal), at least -3; beta in
    (0, 1); eta in (0, 0.9); gamma in (0.5, 1); slopes in (0, 1).

    Parameters
    ----------
    op : str
        An op's name.
    rng : numpy.random.Generator
    B, T, H, HV, K, V : int
        The sizes; HV is H by default.
    dtype : dtype
        All arrays are rounded to it.
    initial_state : bool
        Is a state made too? It is float32, or float64 for float64; of titans the pair (M, Y).
    cu_seqlens : int array [N+1], optional
        Packed sequences, with B = 1. The dict has it too, and the state is that of N sequences.
    normalize : bool or str
        Of linear_attention: says whether its state is the pair (S, z). The dict has it if it is not
        True.
    x : bool
        Of a delta rule with one state: is the key that predicts made too, where it is not k? It
        lies near k, so that the state stays bounded.

    Returns
    -------
    dict of arrays
        By the names of the op's arguments.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.testing import make_inputs
    >>> x = make_inputs("kda", np.random.default_rng(0), T=100, H=2, HV=4, K=8)
    >>> {name: y.shape for name, y in x.items() if name in ("q", "v", "g")}
    {'q': (1, 100, 2, 8), 'v': (1, 100, 4, 4), 'g': (1, 100, 4, 8)}
    >>> linattn.kda(**x)[0].shape
    (1, 100, 4, 4)
    """
    HV = H if HV is None else HV
    dtype = np.dtype(dtype)
    state_dtype = np.float64 if dtype == np.float64 else np.float32
    sizes = {"B": B, "T": T, "H": H, "h": HV, "K": K, "V": V}
    shapes = {name: tuple(sizes[x] for x in letters) for name, letters in _LETTERS[op].items()}
    drawn: dict[str, Any] = {}
    for name in sorted(shapes, key=lambda name: name != "k"):
        drawn[name] = _numbers(op, rng, name, shapes[name], drawn)  # k first: the problems of old
    inputs: dict[str, Any] = {name: drawn[name].astype(dtype) for name in shapes}
    if x:
        inputs["x"] = _near(rng, drawn["k"]).astype(dtype)
    if VARIANTS[op].normaliser and normalize is not True:
        inputs["normalize"] = normalize
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = np.asarray(cu_seqlens)
    if initial_state:
        inputs["initial_state"] = _state(op, rng, inputs, state_dtype, sign=False)
    return inputs


def make_output_gradients(op, rng, inputs):
    """do and d_final_state for the inputs of make_inputs: random, in o's and the state's dtype.

    Parameters
    ----------
    op : str
        An op's name.
    rng : numpy.random.Generator
    inputs : dict
        From :func:`make_inputs`.

    Returns
    -------
    dict of arrays

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.testing import make_inputs, make_output_gradients
    >>> rng = np.random.default_rng(0)
    >>> x = make_inputs("gla", rng, T=100)
    >>> made = make_output_gradients("gla", rng, x)
    >>> {name: y.shape for name, y in made.items()}
    {'do': (1, 100, 1, 4), 'd_final_state': (1, 1, 4, 4)}
    >>> linattn.gla_backward(**made, **x).dg.shape
    (1, 100, 1, 4)
    """
    v = inputs["v"]
    state_dtype = np.float64 if v.dtype == np.float64 else np.float32
    return {
        "do": rng.standard_normal(v.shape).astype(v.dtype),
        "d_final_state": _state(op, rng, inputs, state_dtype, sign=True),
    }


def _state(op, rng, inputs, dtype, sign):
    """S [N,HV,K,V], with z [N,HV,K] where the op is normalised: positive, as a sum of phi(k) is.
    Of a memory with momentum, two of these."""
    (B, _, HV, V), K = inputs["v"].shape, inputs["q"].shape[3]
    N = len(inputs["cu_seqlens"]) - 1 if "cu_seqlens" in inputs else B
    S = rng.standard_normal((N, HV, K, V)).astype(dtype)
    if VARIANTS[op].decay == "pair":
        return S, rng.standard_normal((N, HV, K, V)).astype(dtype)
    if not VARIANTS[op].normaliser or inputs.get("normalize", True) is False:
        return S
    z = rng.standard_normal((N, HV, K))
    return S, (z if sign else np.abs(z)).astype(dtype)
