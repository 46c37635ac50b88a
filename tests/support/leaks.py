"""Calls, right and wrong, made many times over in a child of test_memory.py, which counts what the
process holds meanwhile."""

import gc
import resource
import sys
import warnings

import numpy as np

from linattn import _linattn
from support.compare import arrays_in
from support.problems import function, problem

SIZES = {"B": 2, "T": 9, "H": 1, "HV": 2, "K": 8, "V": 8}


def legal_call(op, pass_, dtype=np.float32, **sizes):
    """A legal call of one pass as (function, arguments)."""
    return function(op, pass_), problem(op, pass_, dtype=dtype, **SIZES | sizes)


def spoiled(op, pass_):
    """Calls that fail, one for every place where a call can: (function, arguments, errors)."""
    function, made = legal_call(op, pass_)
    state = "state" if pass_ == "step" else "initial_state"
    strided = {
        name: x[..., ::2] if x.ndim else x for name, x in made.items() if isinstance(x, np.ndarray)
    }
    bad = [
        {"q": [1.0]},
        {"k": made["k"].astype(int)},
        {"v": made["v"].astype("c8")},
        {"v": made["v"][:1]},
        {"q": made["q"][None, None]},
        {"k": made["k"][..., :3]},
        {state: 3},
        {state: (1, 2)},
        {state: (made["v"],)},
        {state: (made["v"], None)},
        {"scale": "x"},
        {"scale": np.nan},
        {"qk_l2norm": 1},
        {"state_v_first": None},
        strided,
        {"nonsense": 1},
    ]
    if pass_ != "step":
        bad += [
            {"mode": "x"},
            {"mode": 3},
            {"chunk_size": 0},
            {"chunk_size": 2**70},
            {"chunk_size": 1.5},
            {"cu_seqlens": np.array([0, 3])},
            {"cu_seqlens": [0, 9]},
        ]
    if pass_ != "backward":
        bad += [
            {"out": 3},
            {"out": np.zeros(3)},
            {"out": made["v"]},
            {"out": made["v"].astype(np.float64)},
            {"out": made["v"][..., ::-1]},
        ]
    if pass_ == "forward":
        bad += [{"output_final_state": "x"}]
    if op == "linear_attention":
        bad += [{"feature_map": "x"}, {"normalize": 3}, {"eps": -1.0}, {"feature_map": ()}]
    if "g" in made:
        bad += [{"alpha": made["g"]}, {"g": None}, {"g": -made["g"]}]  # the last one warns
    return [(function, made | one) for one in bad]


def blocks_of_legal_calls(op, pass_, batches=12, calls=100):
    """sys.getallocatedblocks after each batch."""
    function, made = legal_call(op, pass_)
    f64, wide = legal_call(op, pass_, dtype=np.float64)
    swapped = {
        name: x.byteswap().view(x.dtype.newbyteorder()) if isinstance(x, np.ndarray) else x
        for name, x in made.items()
    }
    own = {"feature_map": np.exp} if op == "linear_attention" and pass_ != "backward" else {}
    out = {} if pass_ == "backward" else {"out": np.empty_like(made["v"])}
    counts = []
    for _ in range(batches):
        for _ in range(calls):
            function(**made)
            f64(**wide)
            function(**made, **out, **own)
            if pass_ == "forward":
                function(**made, output_final_state=True)
            if pass_ != "step":
                function(**swapped)
        gc.collect()
        counts.append(sys.getallocatedblocks())
    return counts


def blocks_of_wrong_calls(op, pass_, batches=12, calls=100):
    cases = spoiled(op, pass_)
    legal, arguments = legal_call(op, pass_)
    counts = []
    warnings.simplefilter("error")
    for _ in range(batches):
        for _ in range(calls):
            for call, wrong in cases:
                try:
                    call(**wrong)
                except (TypeError, ValueError, RuntimeWarning):
                    pass
            _linattn._fail_allocation(1)
            try:
                legal(**arguments)
            except MemoryError:
                pass
        _linattn._fail_allocation(0)
        gc.collect()
        counts.append(sys.getallocatedblocks())
    return counts


# ---- bytes ----


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def peak_of(function, made):
    """The bytes that a call takes at its highest, and those of its results."""
    # the high-water mark is reset if the kernel allows it; otherwise it only rises
    start = resident()
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        pass
    result = function(**made)
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("VmHWM"):
                peak = int(line.split()[1]) * 1024
    return peak - start, sum(x.nbytes for x in arrays_in(result))


def long_call(op, pass_, T):
    """A call of T tokens, and the bytes of its arguments. A short one goes before: threads are
    started, code is loaded."""
    function, made = legal_call(op, pass_, B=1, T=T, H=1, HV=1, K=64, V=64)
    small, few = legal_call(op, pass_, B=1, T=100, H=1, HV=1, K=64, V=64)
    small(**few)
    return function, made, sum(x.nbytes for x in arrays_in(made))
