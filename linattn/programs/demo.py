"""python -m linattn demo: seven memories read real text once and predict it, with no training.

The state S of a linear attention layer is a model of the tokens that it has read, and every token
is one step of learning: the delta rule is online gradient descent on |k'S - v|^2 (Schlag, Irie and
Schmidhuber 2021; Yang et al. 2024). So the demo lets the states learn to predict text by bytes:

    context of byte t   the bytes before t
    key, query          fixed random signs of the last n bytes: a sign vector for every byte at
                        every distance, multiplied together. Equal contexts have equal keys; two
                        different ones are nearly orthogonal. Each head has its own n.
    value               byte t itself, one-hot
    read                k'S estimates how likely each byte is after that context

A state of K rows can tell about K contexts apart. So there are BUCKETS states per head, and the
last byte picks one: 64 sequences side by side, packed with cu_seqlens. A token's write comes before
its read. So token t of a bucket writes the pair that the bucket saw last (its context and the byte
that followed, both known by then), and reads with the context of byte t.

A few numbers per memory, which are learnt online as well, turn the reads into probabilities
(`Decoder`). Every probability depends on earlier bytes only. So the sum of -log2 p is the length of
a real code, which can be compared with zlib's. Nothing is trained beforehand, and all memories get
the same keys, values and decoder. They differ only in the way that the state uses them.
"""

import codecs
import lzma
import math
import os
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import linattn
from linattn import reference
from linattn.programs import files
from linattn.testing import assert_accurate

ORDERS = (2, 3, 4, 6)  # head h sees the last ORDERS[h] bytes
H, K, V = len(ORDERS), 128, 128
BUCKETS = 64
SEGMENT = 32_768  # tokens of a call; its final states are the next call's initial states
STEPPED = 16_384  # tokens, from the start of the stream, that are run one by one as well
CHECKED = 1_024  # tokens that are compared with the float64 reference, which is slow

# The gates are the same for every token: one number, one per head, or one per head and key.
# linear_attention has no feature map and no normaliser here: the keys have random signs, and the
# decoder divides the reads of every memory by their sum.
FORGET = np.log(np.array([0.9999, 0.9998, 0.9995, 0.999], np.float32))
MEMORIES = {
    "linear_attention": {"feature_map": "identity", "normalize": False},
    "retention": {"gamma": 1 - 2.0 ** -(5 + np.arange(H))},
    "delta_rule": {"beta": np.full(H, 0.2, np.float32)},
    "gated_delta_rule": {"g": FORGET, "beta": np.full(H, 0.2, np.float32)},
    # half of the keys forget, half never do
    "kda": {
        "g": FORGET[:, None] * (np.arange(K) % 2).astype(np.float32),
        "beta": np.full(H, 0.2, np.float32),
    },
    # the same gates; it predicts before it forgets
    "rwkv7": {"g": FORGET[:, None] * (np.arange(K) % 2).astype(np.float32)},
    # a write of 0.1 goes on, by halves, to 0.2
    "titans": {
        "g": FORGET,
        "beta": np.full(H, 0.1, np.float32),
        "eta": np.full(H, 0.5, np.float32),
    },
}
PER_TOKEN = ("g", "beta", "eta")
RATE = np.float32(0.2)  # of rwkv7, in the place of beta


class DemoError(Exception):
    """A message for the user: the input or an option cannot be used."""


# ---------------------------------------------------------------------------------------------
# Input.
# ---------------------------------------------------------------------------------------------

SOURCE = "the Python standard library's source"


def standard_library():
    """The standard library's top-level modules, sorted by name."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def read_text(paths, limit):
    """The first `limit` bytes (None: all) of the files, which follow one another."""
    data = b""
    for path in paths:
        if limit is not None and len(data) >= limit:
            break
        wanted = None if limit is None else limit - len(data)
        try:
            part = files.read(path, wanted, files.TEXT_LIMIT, before=len(data))
        except files.FileError as error:
            raise DemoError(error) from None
        if not part:
            raise DemoError(f"{path}: the file is empty")
        if not looks_like_text(part):
            raise DemoError(f"{path}: looks like a binary file, text is expected")
        data += part
    return data


def looks_like_text(data):
    """Whether there is no NUL, and at most 30 % are control characters.

    In text that is not UTF-8, bytes from 128 up count as control characters.
    """
    odd = set(range(1, 32)) - set(b"\b\t\n\v\f\r\x1b") | {127}
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)  # data may end inside a character
    except UnicodeDecodeError:
        odd |= set(range(128, 256))
    return 0 not in data and sum(map(data.count, odd)) <= 0.3 * len(data)


def order0_entropy(data):
    """Bits per byte of a code that knows how often each byte occurs, and nothing else."""
    share = np.bincount(np.frombuffer(data, np.uint8)) / len(data)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


# ---------------------------------------------------------------------------------------------
# Keys, values, and the two ways to run a memory.
# ---------------------------------------------------------------------------------------------


class Stream:
    """The text as q [1,n,H,K], k [1,n,H,K] and v [1,n,H,V] in float32, for any of its tokens."""

    def __init__(self, data, seed):
        rng = np.random.default_rng(seed)
        self.text = np.frombuffer(data, np.uint8)
        self.padded = np.concatenate([np.zeros(max(ORDERS), np.uint8), self.text])
        signs = rng.integers(0, 2, (max(ORDERS), 256, K), np.int8)
        self.signs = 2 * signs - 1  # [distance, byte, K]
        # the components differ in size, because 128 equal terms of a sum would round the same way
        size = rng.uniform(0.5, 1.5, K)
        self.size = (size / np.linalg.norm(size)).astype(np.float32)
        self.one_hot = np.eye(V, dtype=np.float32)
        self.bucket = self.padded[max(ORDERS) - 1 : -1] % BUCKETS  # of the last byte
        # the previous token of the same bucket, or -1
        order = np.argsort(self.bucket, kind="stable")
        same = self.bucket[order[1:]] == self.bucket[order[:-1]]
        self.previous = np.full(len(self.text), -1)
        self.previous[order[1:][same]] = order[:-1][same]

    def features(self, tokens):
        """Unit vectors [n,H,K] of the contexts of these tokens."""
        out = np.empty((len(tokens), H, K), np.float32)
        product = np.ones((len(tokens), K), np.int8)
        for back in range(1, max(ORDERS) + 1):
            product *= self.signs[back - 1][self.padded[tokens + (max(ORDERS) - back)]]
            if back in ORDERS:
                np.multiply(product, self.size, out=out[:, ORDERS.index(back)])
        return out

    def inputs(self, tokens):
        """q, k, v that read with each token's context and write its bucket's previous pair."""
        before = self.previous[tokens]
        q, k, v = self.features(tokens), self.features(before), self.one_hot[self.text[before] % V]
        k[before < 0] = 0
        v[before < 0] = 0
        return q[None], k[None], np.broadcast_to(v[None, :, None], (1, len(tokens), H, V))

    def packed(self, start, stop):
        """The tokens from start to stop, sorted by bucket: their order, (q, k, v), cu_seqlens."""
        bucket = self.bucket[start:stop]
        order = np.argsort(bucket, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(bucket, minlength=BUCKETS))])
        return order, self.inputs(start + order), starts


def arguments(name, *outer):
    """The memory's own arguments. Those with one value per token are repeated to [*outer, ...]."""
    return {
        key: np.broadcast_to(value, (*outer, *value.shape)) if key in PER_TOKEN else value
        for key, value in MEMORIES[name].items()
    }


def op_of(module, name, suffix=""):
    """The function of a memory, linattn's or the reference's. RWKV-7 is dplr_delta_rule."""
    return getattr(module, {"rwkv7": "dplr_delta_rule"}.get(name, name) + suffix)


def arrays(name, q, k, v):
    """The arrays of a memory. RWKV-7 looks up the key kk = k, and takes off and writes RATE k."""
    return (q, RATE * k, v, k, RATE * k) if name == "rwkv7" else (q, k, v)


def chunked(module, name, inputs, starts, **keywords):
    """(o [n,H,V], state) of one call for a packed segment. module is linattn or the reference."""
    n, op = inputs[0].shape[1], op_of(module, name)
    o, state = op(
        *arrays(name, *inputs), **arguments(name, 1, n), scale=1.0, cu_seqlens=starts, **keywords
    )
    return o[0], state


def stepped(stream, name, n):
    """o [n,H,V] of the first n tokens, run one by one, and the seconds of the loop."""
    step = op_of(linattn, name, "_step")
    pools = np.zeros((2, BUCKETS, 1, H, K, V), np.float32)  # titans has the second too
    states = list(zip(*pools, strict=True)) if name == "titans" else pools[0]
    keywords = {
        key: np.ascontiguousarray(value) if key in PER_TOKEN else value
        for key, value in arguments(name, 1).items()
    }
    inputs = (np.ascontiguousarray(x[0])[:, None] for x in stream.inputs(np.arange(n)))
    tokens = zip(*arrays(name, *inputs), strict=True)
    o = np.empty((n, H, V), np.float32)
    begin = time.perf_counter()
    for t, (b, token) in enumerate(zip(stream.bucket[:n].tolist(), tokens, strict=True)):
        o[t] = step(*token, **keywords, state=states[b], scale=1.0)[0]
    return o, time.perf_counter() - begin


def accurate(stream, name, by_step):
    """Whether the chunked and the stepped outputs both meet linattn.testing's acceptance rule."""
    n = min(CHECKED, len(by_step))
    order, inputs, starts = stream.packed(0, n)
    by_chunk, _ = chunked(linattn, name, inputs, starts)
    ref64, _ = chunked(reference, name, inputs, starts)
    try:
        for out, form in ((by_chunk, "chunk"), (by_step[order], "recurrent")):
            naive, _ = chunked(reference, name, inputs, starts, dtype=np.float32, form=form)
            assert_accurate(out, ref64, naive, dtype=np.float32)
    except AssertionError:
        return False
    return True


# ---------------------------------------------------------------------------------------------
# From reads to bits.
# ---------------------------------------------------------------------------------------------


class Decoder:
    """Mixes the heads' reads into one distribution over the next byte.

    A read x is clipped at 0. Its vote is x / (x + c), where c is a tenth of the head's sum. The
    logits of a softmax are the votes and the logs of the bytes' frequencies so far, each times a
    weight. The weights learn by gradient descent on the code length. A block is coded with the
    weights and frequencies from before the block, so that no prediction uses later bytes.
    """

    BLOCK, RATE, SOFTEN = 256, 0.3, 0.1

    def __init__(self):
        self.weight = np.ones(H, np.float32)
        self.weight0 = 0.3  # the weight of the frequencies
        self.count = np.full(256, 0.1)

    def bits(self, o, row, text):
        """The code lengths [n] of the bytes of `text`; o[row[i]] predicted byte i."""
        out = np.empty(len(text))
        for i in range(0, len(text), self.BLOCK):
            block = slice(i, i + self.BLOCK)
            out[block] = self.block(o[row[block]], text[block])
        return out

    def block(self, x, text):
        """The code lengths [n] of one block, from its reads x [n,H,V]; then learn from it."""
        slot, i = text % V, np.arange(len(text))
        np.maximum(x, 0, out=x)
        x /= x + (self.SOFTEN * x.sum(-1, keepdims=True) + 1e-9)
        both = self.count[:V] + self.count[V:]  # bytes b and b + 128 share a value
        frequency = np.log(both / both.sum()).astype(np.float32)

        p = np.einsum("nhv,h->nv", x, self.weight) + np.float32(self.weight0) * frequency
        p = np.exp(p - p.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        share = self.count[text] / both[slot]
        bits = -np.log2(p[i, slot] * share)

        slope = x[i, :, slot].sum(0) - np.einsum("nhv,nv->h", x, p)
        self.weight += self.RATE / len(text) * slope
        slope0 = frequency[slot].mean() - (p @ frequency).mean()
        self.weight0 += 0.1 * self.RATE * slope0
        self.count += np.bincount(text, minlength=256)
        return bits


# ---------------------------------------------------------------------------------------------
# The run.
# ---------------------------------------------------------------------------------------------


def measure(data, names=tuple(MEMORIES), seed=0, progress=lambda n: None):
    """Stream `data` through the memories: {name: figures}, and the decoder's seconds.

    The figures of a memory are

        bits                the code length [T] of each byte
        chunked, stepped    tokens/s of the op's calls alone
        difference          the largest between chunked and stepped outputs
        accurate            as the function of that name finds

    `progress` is called with the number of tokens done since its last call.
    """
    stream, T = Stream(data, seed), len(data)
    decoders = {name: Decoder() for name in names}
    bits = {name: np.empty(T) for name in names}
    seconds, states = dict.fromkeys(names, 0.0), dict.fromkeys(names)
    figures, decoding = {}, 0.0
    with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
        for start in range(0, T, SEGMENT):
            stop = min(start + SEGMENT, T)
            order, inputs, starts = stream.packed(start, stop)
            row = np.argsort(order)
            o = {}
            for name in names:
                begin = time.perf_counter()
                o[name], states[name] = chunked(
                    linattn,
                    name,
                    inputs,
                    starts,
                    initial_state=states[name],
                    output_final_state=True,
                )
                seconds[name] += time.perf_counter() - begin
            if start == 0:
                for name in names:
                    n = min(STEPPED, stop)
                    by_step, took = stepped(stream, name, n)
                    figures[name] = {
                        "stepped": n / took,
                        "difference": float(np.abs(by_step - o[name][row[:n]]).max()),
                        "accurate": accurate(stream, name, by_step),
                    }
            begin = time.perf_counter()
            for name, part in zip(
                names,
                pool.map(
                    lambda name: decoders[name].bits(o[name], row, stream.text[start:stop]),  # noqa: B023
                    names,
                ),
                strict=True,
            ):
                bits[name][start:stop] = part
            decoding += time.perf_counter() - begin
            progress(stop - start)
    for name in names:
        figures[name].update(bits=bits[name], chunked=T / seconds[name])
    return figures, decoding


def progress_bar(total):
    """A function to call with the number of bytes done; it draws only on a terminal."""
    if not sys.stderr.isatty():
        return lambda n: None
    try:
        from tqdm import tqdm

        return tqdm(total=total, unit="B", unit_scale=True, leave=False).update
    except ImportError:
        done = 0

    def update(n):
        nonlocal done
        done += n
        print(
            f"\r{done / total:4.0%} of {total:,} bytes",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )

    return update


def table(figures, baselines):
    """The report, as text."""
    line = "{:<17}{:>10}{:>15}{:>15}{:>18}{:>10}".format
    rows = [line("", "bits/byte", "chunked tok/s", "stepped tok/s", "max |difference|", "accurate")]
    rows += [line(name, f"{bits:.3f}", *[""] * 4).rstrip() for name, bits in baselines.items()]
    rows += [
        line(
            name,
            f"{f['bits'].mean():.3f}",
            f"{f['chunked']:,.0f}",
            f"{f['stepped']:,.0f}",
            f"{f['difference']:.1e}",
            "yes" if f["accurate"] else "NO",
        )
        for name, f in figures.items()
    ]
    for at in (1, 2 + len(baselines)):
        rows.insert(at, "-" * len(rows[0]))
    return "\n".join(rows)


def check_plot(path):
    """Raise DemoError, before the long run, if the picture could not be written after it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise DemoError("--plot needs matplotlib: pip install 'linattn[plot]'") from None
    path, known = Path(path), FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise DemoError(f"{path}: the name must end in one of .{', .'.join(sorted(known))}")
    try:
        files.expect_replaceable(path)
    except files.FileError as error:
        raise DemoError(error) from None
    folder = path.absolute().parent
    if not folder.exists() or not os.access(folder, os.W_OK):
        raise DemoError(f"{path}: cannot be written")


def plot(path, figures, baselines):
    """Draw bits per byte along the stream; each point is the mean of a hundredth of it."""
    from matplotlib.figure import Figure

    axes = (figure := Figure((8, 5), layout="constrained")).add_subplot()
    for name, f in figures.items():
        T = len(f["bits"])
        # the lines of the delta rules nearly coincide: dashes show all of them
        style = {"gated_delta_rule": "--", "kda": ":", "rwkv7": "-."}.get(name, "-")
        edges = np.unique(np.linspace(0, T, 101).astype(int))
        means = np.add.reduceat(f["bits"], edges[:-1]) / np.diff(edges)
        axes.plot(
            (edges[:-1] + edges[1:]) / 2,
            means,
            lw=1.5,
            ls=style,
            label=f"{name}  {f['bits'].mean():.2f}",
        )
    for (name, value), style in zip(baselines.items(), (":", "--", "-."), strict=True):
        axes.axhline(value, color="0.4", lw=1, ls=style, label=f"{name}  {value:.2f}")
    axes.set(
        xlabel="bytes read",
        ylabel="bits per byte",
        xlim=(0, T),
        ylim=(0, None),
        title="Predicting each next byte of a text, learning online",
    )
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    axes.grid(alpha=0.25)
    files.save_figure(figure, path)


def run(paths=(), limit=2_000_000, names=tuple(MEMORIES), plot_path=None, seed=0):
    """The whole demo: read, measure, print a report, and draw if `plot_path` is given."""
    begin = time.perf_counter()
    if plot_path is not None:
        check_plot(plot_path)
    data = read_text(paths or standard_library(), limit)
    source = ", ".join(map(str, paths)) or SOURCE
    print(f"{len(data):,} bytes of {source}\n", flush=True)
    baselines = {
        "order-0 entropy": order0_entropy(data),
        "zlib -9": 8 * len(zlib.compress(data, 9)) / len(data),
        "lzma": 8 * len(lzma.compress(data)) / len(data),
    }
    figures, decoding = measure(data, names, seed, progress_bar(len(data)))
    print(table(figures, baselines))
    n = min(STEPPED, len(data))
    print(f"""
Bits per byte: code length of every byte, predicted before it was seen; nothing is trained.
linear_attention: no feature map, not normalised. {H} heads of {BUCKETS} states, K = {K}, V = {V}.
tok/s: the op's own calls; decoding the reads took {decoding:.1f} s for all, the whole run \
{time.perf_counter() - begin:.1f} s.
max |difference|: chunked against stepped, first {n:,} tokens. accurate: chunked and stepped both
within linattn.testing's rule of the float64 reference, first {min(CHECKED, n):,} tokens.""")
    if plot_path is not None:
        plot(plot_path, figures, baselines)
        print(f"\nwrote {plot_path}")
    if not all(math.isfinite(f["bits"].sum()) and f["accurate"] for f in figures.values()):
        raise RuntimeError("a memory is not within the acceptance rule, see the table")
