"""The first call in a fresh process, and the peers' kernels compiled by many processes at once.

As a program, `python -m benchmarks.first DEVICE PEER CASE` takes a case as JSON and prints
{"import": seconds, "call": seconds}. Before the clock starts PyTorch is imported, the device is in
use and the inputs are there.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

SHORT = 256  # tokens, on whose number compiled code does not depend
LIMIT = 400  # seconds


def one(device, name, case, how, env=None):
    """The result of a fresh process."""
    from .base import Result

    result = Result(case, name, "first", note=how)
    command = [sys.executable, "-m", "benchmarks.first", device, name, json.dumps(asdict(case))]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=os.environ | (env or {})
        )
    except subprocess.TimeoutExpired:
        result.error = f"more than {LIMIT} s"
        return result
    if done.returncode:
        result.error = (done.stderr.strip() or f"status {done.returncode}").split("\n")[-1]
        return result
    result.add("total", time.monotonic() - start)
    for kind, seconds in json.loads(done.stdout.strip().split("\n")[-1]).items():
        result.add(kind, seconds)
    return result


def ours(device, cases):
    """One fresh process after another, nothing beside it: the first case of each op."""
    chosen = {}
    for case in cases:
        chosen.setdefault(case.op, case)
    return [one(device, "linattn", case, "alone") for case in chosen.values()]


def compile_peers(peers, cases, workers, say):
    """Every peer's kernels compiled, `workers` processes side by side, into the caches on disk that
    this process will find them in. Their choice among kernels is not kept."""
    env = {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}
    todo = dict.fromkeys(  # once each, in order
        (peer.name, replace(case, T=min(case.T, SHORT)))
        for case in cases
        for peer in peers
        if peer.has(case) and (case.pass_ == "forward" or case.B == 1)
    )

    def work(item):
        found = one("cuda", *item, f"{workers} processes side by side", env)
        say(f"{item[0]} {item[1]}: {found.error or format(found.median('total'), '.0f') + ' s'}")
        return found

    with ThreadPoolExecutor(workers) as pool:
        # backwards, because the last ops of the table have the most kernels
        return list(pool.map(work, reversed(todo)))[::-1]


def main():
    device, name, case = sys.argv[1:]
    import torch

    def sync():
        if device == "cuda":
            torch.cuda.synchronize()

    torch.zeros(1, device=device)
    sync()
    start = time.perf_counter()
    import linattn  # noqa: F401

    seconds = time.perf_counter() - start
    from .base import Case
    from .inputs import torch_inputs
    from .peers_cpu import available
    from .peers_cuda import MAKERS, OURS

    case, peer = Case(**json.loads(case)), OURS
    x = torch_inputs(case, device, 0)
    if name != "linattn":
        start = time.perf_counter()
        peer = next(p for p in available(MAKERS)[0] if p.name == name)
        seconds = time.perf_counter() - start
    sync()
    with torch.inference_mode():
        call = peer.make(case, x)
        start = time.perf_counter()
        call()
        sync()
    print(json.dumps({"import": seconds, "call": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
