#!/usr/bin/env python3
"""Small calls of every op on a GPU, each compared with the reference: for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py --ops kda,gla --dtypes bfloat16

memcheck, racecheck, initcheck and synccheck make a program ten to a hundred times slower; without
them all of this takes a minute or two. Every array is an allocation of its own, so that one element
too far is seen. racecheck follows a barrier from thread to thread, not from a warp's lanes to the
one that arrives for all of them: build with NVCC_APPEND_FLAGS=-DLA_EVERY_LANE_ARRIVES for it.
Otherwise it reports races between the fetching warps and the others where there are none. The exit
status is 1 if a result is wrong. The sanitizer has a status of its own: see its --error-exitcode.
"""

import argparse
import itertools
import os
import sys
import time
import zlib

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # PyTorch's blocks would hide what is too far

import ml_dtypes
import numpy as np
import torch
from support.compare import over_arrays
from support.gpu import to_gpu
from support.grid import Pool, gradients_on_tensor_cores, on_tensor_cores, v_first, wider
from support.problems import PER_TOKEN
from support.tensors import to_numpy

import linattn
from linattn import reference, testing

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "tf32": np.float32,
}  # the last: allowed in a forward pass
MODES = ("chunk", "recurrent", "parallel")
STEPS = ("step", "pool")  # the states of the second picked by state_indices
GRADIENTS = "gradients"  # of the chunked form, or of what stands in for it

# T, K, V, H, HV, B, cu_seqlens, options. Around a tile and a chunk, and far from either.
SHAPES = {
    "one": (1, 1, 1, 1, 1, 1, None, {}),
    "odd": (67, 59, 33, 1, 2, 2, None, {"qk_l2norm": True}),
    "tile": (65, 64, 64, 2, 2, 1, None, {"state_v_first": True}),
    "packed": (130, 72, 100, 1, 4, 1, [0, 0, 1, 65, 65, 129, 130], {}),
    "wide": (70, 256, 128, 1, 1, 1, None, {}),
    "wide and odd": (70, 200, 33, 1, 2, 1, None, {}),
    "widest": (70, 320, 33, 1, 2, 1, None, {}),  # token by token, whatever the mode
    "empty": (0, 8, 8, 1, 1, 2, None, {}),
    # few heads and many chunks: the sequence in segments; many heads: states stream
    "long": (2100, 64, 64, 1, 1, 1, None, {}),
    "wide and long": (2100, 160, 24, 1, 1, 1, None, {}),
    "many": (3, 64, 128, 8, 16, 20, None, {}),
    # some blocks prepare and others walk: with one panel of columns in a block, and with two
    "apart": (1000, 128, 104, 1, 2, 1, None, {"qk_l2norm": True}),
    "apart by panels": (700, 104, 128, 24, 48, 1, None, {}),
    # the ends of segments first
    "ends": (4200, 128, 104, 1, 1, 1, None, {}),
}


def inputs_of(op, dtype, shape, rng):
    """The arguments, for the reference and for the op (on the host)."""
    T, K, V, H, HV, B, cu, options = shape
    x = testing.make_inputs(
        op,
        rng,
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        dtype=dtype,
        initial_state=True,
        cu_seqlens=None if cu is None else np.array(cu, np.int32),
    )
    x |= {name: value for name, value in options.items() if name != "state_v_first"}
    given = x | options
    if "state_v_first" in options:
        given["initial_state"] = v_first(x["initial_state"])
    return x, given


def forward(op, mode, given):
    gpu = over_arrays(to_gpu, given)
    gpu["out"] = torch.full_like(gpu["v"], torch.nan)
    o, state = getattr(linattn, op)(**gpu, mode=mode, output_final_state=True)
    assert o is gpu["out"]
    return o, state


def step(op, given, pooled):
    gpu = over_arrays(to_gpu, given)
    for name in PER_TOKEN:
        if name in gpu:
            gpu[name] = gpu[name][:, 0].clone()
    state = gpu.pop("initial_state")
    if pooled:
        return pooled_step(op, gpu, state)
    return getattr(linattn, f"{op}_step")(**gpu, state=state)[:, None], state


def pooled_step(op, gpu, state):
    """The states lie in every other slot of a pool, in reverse order. The batch has a further row
    for every index that names no state: its output must be zero. The slots between must stay as
    they were."""
    B = len(gpu["v"])
    nowhere = [-1, -2, 2 * B, 2**31 - 1, -(2**31)]
    slots = torch.arange(2 * B - 1, -1, -2)
    indices = torch.cat([slots, torch.tensor(nowhere)]).to(torch.int32 if B % 2 else torch.int64)
    for name in PER_TOKEN:
        if name in gpu:
            more = [len(nowhere), *gpu[name].shape[1:]]
            gpu[name] = torch.cat([gpu[name], torch.full(more, torch.nan).to(gpu[name])])

    def pool_of(s):
        pool = torch.full([2 * B, *s.shape[1:]], 3.0).to(s)
        pool[slots.cuda()] = s
        return pool

    pool = over_arrays(pool_of, state)
    o = getattr(linattn, f"{op}_step")(**gpu, state=pool, state_indices=indices.cuda())
    assert not o[B:].any(), f"{op}: a row without a state is not zero"
    for s in pool if isinstance(pool, tuple) else (pool,):
        assert (s[::2] == 3).all(), f"{op}: a state that no row has was written"
    return o[:B, None], over_arrays(lambda s: s[slots.cuda()], pool)


def rounds(op, dtype, shape, what):
    """Are its products those of tensor cores?"""
    T, K, V = shape[:3]
    if what == GRADIENTS:
        return gradients_on_tensor_cores(op, np.dtype(DTYPES[dtype]), K, V, "chunk", T)
    return (
        on_tensor_cores(np.dtype(DTYPES[dtype]), K, what, T, tf32=dtype == "tf32")
        and what not in STEPS
    )


def check(pool, op, what, x, given):
    """One call, and its outputs into the pool beside their reference."""
    if what in STEPS:  # the first token of each sequence
        x, given = (
            {name: a[:, :1] if name in PER_TOKEN else a for name, a in y.items()}
            for y in (x, given)
        )
    if what == GRADIENTS:
        check_gradients(pool, op, x, given)
        return
    made = step(op, given, what == "pool") if what in STEPS else forward(op, what, given)
    o, state = over_arrays(to_numpy, made)
    if given.get("state_v_first"):
        state = v_first(state)
    form = {"form": "recurrent" if pool.state_dtype is None else what, "chunk_size": 16}

    def naive(x, dtype=x["v"].dtype, **how):
        return dict(
            zip(("o", "final_state"), getattr(reference, op)(**x, dtype=dtype, **how), strict=True)
        )

    pool.add(
        {"o": o, "final_state": state}, naive(x, wider(x["v"].dtype)), lambda x: naive(x, **form), x
    )


def check_gradients(pool, op, x, given):
    d = testing.make_output_gradients(op, np.random.default_rng(1), x)
    turned = given.get("state_v_first")
    there = d | ({"d_final_state": v_first(d["d_final_state"])} if turned else {})
    grads = getattr(linattn, f"{op}_backward")(
        **over_arrays(to_gpu, there), **{name: over_arrays(to_gpu, a) for name, a in given.items()}
    )
    made = {name: over_arrays(to_numpy, a) for name, a in grads._asdict().items() if a is not None}
    if turned:
        made["d_initial_state"] = v_first(made["d_initial_state"])

    def naive(x, dtype=x["v"].dtype, **how):
        found = reference.backward(op, **x, dtype=dtype, **how)._asdict()
        return {name: found[name] for name in made}

    x = x | d
    pool.add(
        made, naive(x, wider(x["v"].dtype)), lambda x: naive(x, form="chunk", chunk_size=16), x
    )


def choices(text, known):
    chosen = text.split(",")
    for one in chosen:
        if one not in known:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {one!r}")
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, known in (
        ("ops", linattn.OPS),
        ("dtypes", DTYPES),
        ("shapes", SHAPES),
        ("modes", MODES),
        ("passes", ("forward", "step", "backward")),
    ):
        parser.add_argument(
            f"--{name}",
            default=list(known),
            metavar="A,B",
            type=lambda text, known=known: choices(text, known),
            help=f"some of {', '.join(known)}",
        )
    parser.add_argument("-v", "--verbose", action="store_true", help="name every call before it")
    chosen = parser.parse_args()
    if not linattn.cuda.is_available():
        sys.exit(f"no GPU: {linattn.cuda.why_not()}")

    began, calls, problems = time.perf_counter(), 0, []
    runs = [
        *(chosen.modes if "forward" in chosen.passes else ()),
        *(STEPS if "step" in chosen.passes else ()),
        *([GRADIENTS] if "backward" in chosen.passes else []),
    ]
    for op, dtype, what in itertools.product(chosen.ops, chosen.dtypes, runs):
        # the rule compares largest errors, so shapes are judged together
        tf32 = dtype == "tf32" and what in MODES
        if dtype == "tf32" and not tf32:
            continue  # nothing that float32 is not
        exact, rounded = Pool(), Pool(state_dtype=DTYPES[dtype])
        for name in chosen.shapes:
            shape = SHAPES[name]
            if what in STEPS and (not shape[0] or shape[6]):
                continue
            label = f"{op} {dtype} {what}"
            if chosen.verbose:
                print(label, name, flush=True)
            rng = np.random.default_rng(zlib.crc32(f"{label} {name}".encode()))
            x, given = inputs_of(op, np.dtype(DTYPES[dtype]), shape, rng)
            given |= {"allow_tf32": True} if tf32 else {}
            check(rounded if rounds(op, dtype, shape, what) else exact, op, what, x, given)
            calls += 1
        for pool in (exact, rounded):
            try:
                pool.judge(label, gradient=what == GRADIENTS, tf32=tf32 and pool is rounded)
            except AssertionError as error:
                problems.append(str(error))
    for text in problems:
        print(text)
    print(f"{calls} calls, {len(problems)} wrong, {time.perf_counter() - began:.1f} s")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
