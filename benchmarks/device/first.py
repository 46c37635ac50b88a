"""The first call in a fresh process, and the peers' kernels compiled by many processes at once.

As a script: first.py DEVICE WHO OP FACE B T H HV D DTYPE prints {"import_s": ..., "call_s": ...},
PyTorch imported, the device in use and the inputs there before the clock starts.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

SHORT = 256  # tokens: what is compiled does not depend on them
LIMIT = 400  # seconds


def one(device, who, case, env=None):
    """What the script prints for a case, with "total_s"; {"error": ...} where it fails."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), device, who, case.op, case.face,
               *(str(n) for n in (case.B, case.T, case.H, case.HV, case.D)), case.dtype]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT,
                              env=os.environ | (env or {}))
    except subprocess.TimeoutExpired:
        return {"error": f"more than {LIMIT} s"}
    if done.returncode:
        return {"error": (done.stderr.strip() or f"status {done.returncode}").split("\n")[-1]}
    return json.loads(done.stdout.strip().split("\n")[-1]) | {"total_s": time.monotonic() - start}


def row(who, case, how, found):
    return {"who": who, "case": str(case), "op": case.op, "face": case.face, "how": how} | found


def ours(device, cases):
    """One fresh process after another, nothing beside it: the first case of each op."""
    chosen = {}
    for case in cases:
        chosen.setdefault(case.op, case)
    return [row("linattn", case, "alone", one(device, "linattn", case))
            for case in chosen.values()]


def compile_peers(device, peers, cases, workers, say):
    """Every peer's kernels compiled, `workers` processes side by side, into the caches on disk that
    this process will find them in; what they tune among themselves is not kept."""
    env = {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}
    todo = {}
    for case in cases:
        for peer in peers:
            if peer.has(case) and (case.face == "forward" or case.B == 1):
                short = replace(case, T=min(case.T, SHORT), why="", quick=False)
                todo[peer.name, short] = None  # once each, in order

    def work(item):
        who, case = item
        found = one(device, who, case, env)
        say(f"{who} {case}: {found.get('error') or format(found['total_s'], '.0f') + ' s'}")
        return row(who, case, f"{workers} processes side by side", found)
    with ThreadPoolExecutor(workers) as pool:
        # backwards: the table's last ops have the most kernels, for which all would wait
        return list(pool.map(work, reversed(todo)))[::-1]


def main():
    device, who, op, face, *sizes, D, dtype = sys.argv[1:]
    import torch

    def sync():
        if device == "cuda":
            torch.cuda.synchronize()
    torch.zeros(1, device=device)
    sync()
    start = time.perf_counter()
    import linattn  # noqa: F401
    seconds = time.perf_counter() - start
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from device.cases import Case, inputs
    from device.peers import OURS, available

    case = Case(op, face, *(int(n) for n in sizes), why="", D=int(D), dtype=dtype)
    x, peer = inputs(case, device, 0), OURS
    if who != "linattn":
        start = time.perf_counter()
        peer = next(p for p in available(device)[0] if p.name == who)
        seconds = time.perf_counter() - start
    sync()
    with torch.inference_mode():
        call = peer.make(case, x)
        start = time.perf_counter()
        call()
        sync()
    print(json.dumps({"import_s": seconds, "call_s": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
