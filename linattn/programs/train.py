"""python -m linattn train: train a byte-level language model on real text. Needs PyTorch.

A token is a byte. The model is an embedding, blocks, a norm, and the embedding again as the head. A
block is

    x = x + mixer(norm(x))        one of linattn.nn's layers, or attention for comparison
    x = x + mlp(norm(x))          SwiGLU

The mixers have heads of the same size, and so states [H,K,V] of the same size. They differ in the
way that they forget and write. Softmax attention keeps all keys and values instead.

The last part of the text is held out: nothing is learnt from it. Its figure, in bits per byte, is
the length of a code for those bytes. Each is predicted from the bytes before it, at most T, in its
window of T. zlib and lzma compress the same bytes. They begin without knowledge, but see further
back than one window; the model has learnt from the text before. So the figures say how good the
model is, and not which of them is the better compressor.

A checkpoint has everything that the next step depends on: a run that goes on from it computes the
same as the uninterrupted run. On a CPU, with the same number of threads, the bits are the same.
"""

import lzma
import math
import os
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from linattn import cuda, ops
from linattn import nn as layers
from linattn.nn._blocks import SharesTokens, told
from linattn.programs import checkpoint, demo, files
from linattn.programs.progress import CtrlC, Progress, draw
from linattn.programs.sharing import Alone, SharingError, shared_by

CHECKPOINT = "checkpoint.pt"
PER_PARAMETER = 12  # bytes of a checkpoint: a float32, and AdamW's two moments
ALONE = Alone()
FETCH = 10  # steps from one fetch of the losses to the next; a fetch waits for the device
WINDOWS = 64  # of held-out text, at most, that give a figure during the run


class TrainError(Exception):
    """A message for the user: the input or an option cannot be used."""


# ---------------------------------------------------------------------------------------------
# Mixers.
# ---------------------------------------------------------------------------------------------


class _Attention(SharesTokens):
    """The projections to q, k and v by heads, and the output's projection."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def qkv(self, x):
        return self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)


class LinearAttention(_Attention):
    """Linear attention with the state (S, z)."""

    def forward(self, x, state=None):
        """x [B,T,D] -> y [B,T,D] and the state after it."""
        run = told(ops.linear_attention, self.cut(x, None))
        o, state = run(*self.qkv(x), initial_state=state, output_final_state=True)
        return self.o_proj(o.flatten(-2)), state

    def step(self, x, state):
        """x [B,D] -> y [B,D]. The state changes in place."""
        return self.o_proj(ops.linear_attention_step(*self.qkv(x), state=state).flatten(-2))


class SoftmaxAttention(_Attention):
    """Attention with rotary positions. The state is the list of the keys and values so far."""

    def forward(self, x, state=None):
        """x [B,T,D] -> y [B,T,D] and the state after it."""
        q, k, v = (y.transpose(1, 2) for y in self.qkv(x))
        past = 0 if state is None else state[0].shape[2]
        q, k = _rotated(q, past), _rotated(k, past)
        mask = None
        if past:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(past)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not past)
        return self.o_proj(o.transpose(1, 2).flatten(-2)), [k, v]

    def step(self, x, state):
        """x [B,D] -> y [B,D]. The state grows in place."""
        y, state[:] = self(x[:, None], state)
        return y[:, 0]


def _rotated(x, start):
    """x [B,H,T,K] rotated by position; its first token is at `start`."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(start, start + x.shape[2], device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# Each mixer has H heads with K = V = head_dim, and d_model = H head_dim. It is number i of n.
MIXERS = {
    "gated_delta_net": lambda D, H, i, n: layers.GatedDeltaNet(
        D, num_heads=H, head_dim=D // H, expand_v=1
    ),
    "delta_net": lambda D, H, i, n: layers.DeltaNet(D, num_heads=H),
    "kda": lambda D, H, i, n: layers.KimiDeltaAttention(D, num_heads=H, head_dim=D // H),
    "rwkv7": lambda D, H, i, n: layers.RWKV7(D, head_dim=D // H, layer_idx=i, num_layers=n),
    "titans": lambda D, H, i, n: layers.Titans(D, num_heads=H, head_dim=D // H),
    "mamba": lambda D, H, i, n: layers.Mamba(D, expand=1),
    "mamba2": lambda D, H, i, n: layers.Mamba2(D, d_state=D // H, headdim=D // H, expand=1),
    "gla": lambda D, H, i, n: layers.GatedLinearAttention(D, num_heads=H, expand_k=1),
    "retention": lambda D, H, i, n: layers.Retention(D, num_heads=H, expand_v=1),
    "linear_attention": lambda D, H, i, n: LinearAttention(D, H),
    "softmax": lambda D, H, i, n: SoftmaxAttention(D, H),
}


# ---------------------------------------------------------------------------------------------
# The model.
# ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A mixer and an MLP. RWKV-7's blocks pass on the values of the first one."""

    def __init__(self, layer, d_model, num_heads, index, num_blocks):
        super().__init__()
        hidden = 64 * round(d_model * 8 / 3 / 64)
        self.mixer_norm = nn.RMSNorm(d_model, eps=1e-5)
        self.mlp_norm = nn.RMSNorm(d_model, eps=1e-5)
        self.mixer = MIXERS[layer](d_model, num_heads, index, num_blocks)
        self.up = nn.Linear(d_model, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)
        self.shares_values = isinstance(self.mixer, layers.RWKV7)
        for last in self.ends():
            nn.init.zeros_(last.weight)  # a block begins as the identity

    def ends(self):
        """The last matrices of the mixer and of the MLP."""
        mixer = self.mixer
        return mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj, self.down

    def forward(self, x, state=None, values=None):
        y = self.mixer_norm(x)
        if self.shares_values:
            y, state, values = self.mixer(y, state, v_first=values, output_v_first=True)
        else:
            y, state = self.mixer(y, state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state, values

    def step(self, x, state, values=None):
        y = self.mixer_norm(x)
        if self.shares_values:
            y, values = self.mixer.step(y, state, values, output_v_first=True)
        else:
            y = self.mixer.step(y, state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), values

    def mlp(self, x):
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class LanguageModel(nn.Module):
    """The logits of the byte after each byte. `step` goes on from the states of `forward`."""

    def __init__(self, layer, d_model, num_heads, num_blocks):
        super().__init__()
        self.embedding = nn.Embedding(256, d_model)
        self.blocks = nn.ModuleList(
            Block(layer, d_model, num_heads, i, num_blocks) for i in range(num_blocks)
        )
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens, states=None):
        """tokens [B,T] -> logits [B,T,256], and the state of each block."""
        x, values, after = self.embedding(tokens), None, []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state, values = block(x, state, values)
            after.append(state)
        return self.head(x), after

    @torch.no_grad()
    def step(self, tokens, states):
        """tokens [B] -> logits [B,256]. The states change in place."""
        x, values = self.embedding(tokens), None
        for block, state in zip(self.blocks, states, strict=True):
            x, values = block.step(x, state, values)
        return self.head(x)

    def head(self, x):
        return F.linear(self.norm(x), self.embedding.weight)


def code_length(model, tokens):
    """Bits [B,T] of tokens[:, 1:], each predicted from the tokens before it; tokens [B,T+1]."""
    device = tokens.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits, _ = model(tokens[:, :-1])
    nats = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return nats.view(logits.shape[:2]) / math.log(2)


# ---------------------------------------------------------------------------------------------
# The text.
# ---------------------------------------------------------------------------------------------


def read(options):
    """The text, and the position at which its held-out part begins."""
    try:
        data = demo.read_text(options["files"] or demo.standard_library(), None)
    except demo.DemoError as error:
        raise TrainError(error) from None
    first = len(data) - max(1, round(len(data) * options["held_out"]))
    if first <= options["context"]:
        raise TrainError(
            f"the text is too short: {len(data):,} bytes, of which {max(first, 0):,} "
            f"to learn from; --context {options['context']} takes one more than that"
        )
    return data, first


def windows(text, starts, T):
    """tokens [B,T+1]: for each start, the byte before it and T bytes from it on."""
    return text[starts[:, None] + torch.arange(-1, T, device=text.device)].long()


@torch.no_grad()
def held_out_bits(model, text, first, T, batch, every=1, sharing=ALONE):
    """Bits per byte of text[first:] in windows of T, each from an empty state.

    Only every `every`-th window counts.
    """
    starts = torch.arange(first, len(text), T, device=text.device)[::every]
    text = F.pad(text, (0, T))  # the last window may end in these zeros, which do not count
    total = count = 0
    for some in starts.split(batch):
        at = sharing.part(torch.arange(-1, T, device=text.device)[None])[:, 1:]
        inside = some[:, None] + at < len(text) - T
        bits = code_length(model, sharing.part(windows(text, some, T)))
        total += (bits.double() * inside).sum().item()
        count += inside.sum().item()
    return sharing.total(total) / sharing.total(count)


# ---------------------------------------------------------------------------------------------
# The run.
# ---------------------------------------------------------------------------------------------


def language_model(options):
    """The model that the options describe, or TrainError."""
    D, head_dim = options["d_model"], options["head_dim"]
    if D % head_dim or head_dim % 2:
        raise TrainError(
            f"--head-dim: expected an even number that divides --d-model {D}, got {head_dim}"
        )
    return LanguageModel(options["layer"], D, D // head_dim, options["blocks"])


def groups(model):
    """The optimizer's groups of parameters: matrices have weight decay, the others have none."""
    return [
        {
            "params": [p for p in model.parameters() if (p.dim() > 1) == matrices],
            "weight_decay": 0.1 * matrices,
        }
        for matrices in (True, False)
    ]


class Training:
    """A model in training: everything that a checkpoint holds."""

    def __init__(self, options, device, sharing=ALONE):
        torch.manual_seed(options["seed"])
        self.options, self.device, self.sharing = options, device, sharing
        self.model = language_model(options).to(device)
        self.optimizer = torch.optim.AdamW(groups(self.model), betas=(0.9, 0.95), fused=True)
        self.batches = torch.Generator().manual_seed(options["seed"])
        self.step = 0
        self.losses = []  # bits per byte of each step
        self.pending = []  # the latest losses, still on the device
        self.held_out = []  # (step, bits per byte)

    def rate(self):
        """The learning rate of this step: it rises linearly, then falls by half a cosine to 0."""
        o, warmup = self.options, min(100, self.options["steps"] // 10)
        if self.step < warmup:
            return o["lr"] * (self.step + 1) / (warmup + 1)
        done = (self.step - warmup) / max(1, o["steps"] - warmup)
        return o["lr"] * (1 + math.cos(math.pi * done)) / 2

    def train_step(self, text, first):
        """One step on a batch of windows of text[:first]."""
        T, rate = self.options["context"], self.rate()
        starts = torch.randint(1, first - T + 1, (self.options["batch"],), generator=self.batches)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens = self.sharing.part(windows(text, starts.to(self.device), T))
        loss = code_length(self.model, tokens).mean()
        self.optimizer.zero_grad()
        (loss * math.log(2)).backward()
        self.sharing.gradients(self.model.parameters())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.pending.append(loss.detach())

    def fetch_losses(self):
        """Fetch the losses since the last fetch, which waits for the device; their number."""
        new, self.pending = self.pending, []
        losses = self.sharing.mean(torch.stack(new)).tolist() if new else []
        if not math.isfinite(sum(losses)):
            raise RuntimeError(f"the loss at step {self.step} is not finite: try a smaller --lr")
        self.losses += losses
        return len(losses)

    def recent(self):
        """The mean of the latest losses, at most `every`."""
        some = self.losses[-self.options["every"] :]
        return sum(some) / len(some)

    def save(self, path, text):
        """Write a checkpoint. If that fails, nothing is written."""
        if self.sharing.rank:
            return
        with files.replaced(path) as file:
            torch.save(
                {
                    "format": checkpoint.FORMAT,
                    "options": self.options,
                    "text": fingerprint(text),
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "step": self.step,
                    "losses": self.losses,
                    "held_out": self.held_out,
                    "batches": self.batches.get_state(),
                    "random": torch.get_rng_state(),
                    "random_cuda": torch.cuda.get_rng_state_all() if self.device == "cuda" else [],
                },
                file,
            )

    def restore(self, saved):
        """Take the state of a run from a checkpoint."""
        self.model.load_state_dict(saved["model"])
        # the groups follow from the options; the checkpoint's are not used
        self.optimizer.load_state_dict(
            self.optimizer.state_dict() | {"state": saved["optimizer"]["state"]}
        )
        self.step, self.losses, self.held_out = (
            saved[name] for name in ("step", "losses", "held_out")
        )
        self.batches.set_state(saved["batches"])
        torch.set_rng_state(saved["random"])
        if self.device == "cuda" and saved["random_cuda"]:
            torch.cuda.set_rng_state_all(saved["random_cuda"])


def fingerprint(data):
    """The length and a checksum."""
    return [len(data), zlib.crc32(data)]


def skeleton(options):
    """The model of a checkpoint and its optimizer's groups, on the meta device: no memory."""
    try:
        with torch.device("meta"):
            model = language_model(options)
    except TrainError as error:
        raise checkpoint.CheckpointError(error) from None
    return model, groups(model)


def load(path):
    """A checkpoint that a run can go on with, on the CPU."""
    try:
        return checkpoint.load(path, skeleton)
    except checkpoint.CheckpointError as error:
        raise TrainError(f"--resume {error}") from None


def prepare(options, out, resume, plot, device, prompt, sharing=ALONE):
    """Everything that the run needs. Errors that would end a run later are raised here."""
    saved = None if resume is None else load(resume)
    options = options if saved is None else saved["options"]
    if not prompt:
        raise TrainError("--prompt: expected at least one byte")
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainError("--device cuda: PyTorch finds no GPU")
    if device == "cuda" and options["layer"] != "softmax" and not cuda.is_available():
        raise TrainError(f"--device cuda: {cuda.why_not()}")
    text, first = read(options)
    training = Training(options, device, sharing)
    size = PER_PARAMETER * sum(p.numel() for p in training.model.parameters())
    if size > files.CHECKPOINT_LIMIT:
        raise TrainError(
            f"the model is too large: its checkpoint has {size:,} bytes, and "
            f"--resume reads at most {files.CHECKPOINT_LIMIT:,}"
        )
    if saved is not None:
        if saved["text"] != fingerprint(text):
            raise TrainError(f"--resume {resume}: the text is not what it was trained on")
        training.restore(saved)
    if out is None:
        out = "linattn-train" if resume is None else Path(resume).parent
    out = Path(out)
    if resume is None and (out / CHECKPOINT).exists():
        raise TrainError(
            f"{out / CHECKPOINT} is there already: go on with it (--resume "
            f"{out / CHECKPOINT}), or choose another directory (--out)"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"--out {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise TrainError(f"--out {out}: cannot be written")
    try:
        demo.check_plot(plot if plot is not None else out / "loss.png")
    except demo.DemoError as error:
        if plot is not None:
            raise TrainError(error) from None
        print(f"no loss curve will be drawn: {error}")
    else:
        plot = out / "loss.png" if plot is None else Path(plot)
    return training, text, first, out, plot


def train(training, text, data, first, path):
    """Train up to the last step. Checkpoints are written after every `every` steps and the last."""
    o = training.options
    every = max(1, -(-(len(data) - first) // o["context"]) // WINDOWS)
    with CtrlC() as ctrl_c, Progress(training) as progress:
        while training.step < o["steps"] and not training.sharing.any(ctrl_c.came):
            training.train_step(text, first)
            is_due = training.step % o["every"] == 0 or training.step == o["steps"]
            if is_due or training.step % FETCH == 0:
                progress.trained(training.fetch_losses())
            if is_due:
                bits = held_out_bits(
                    training.model, text, first, o["context"], o["batch"], every, training.sharing
                )
                training.held_out.append((training.step, bits))
                progress.evaluated(bits)
                training.save(path, data)
        if training.step < o["steps"]:  # Ctrl-C
            training.fetch_losses()
            training.save(path, data)
            raise KeyboardInterrupt(
                f"stopped after step {training.step} of {o['steps']}; to go on: "
                f"python -m linattn train --resume {path}"
            )
    return progress


@torch.no_grad()
def sample(model, prompt, n, temperature, seed=0):
    """n bytes after the prompt: `forward` reads the prompt, then each byte goes through `step`."""
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    logits, states = model(torch.tensor([list(prompt)], device=device))
    made = [_drawn(logits[:, -1], temperature, generator)]
    while len(made) < n:
        made.append(_drawn(model.step(made[-1], states), temperature, generator))
    return bytes(torch.cat(made).tolist())


def _drawn(logits, temperature, generator):
    """Tokens [B] drawn from logits [B,256]."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def run(
    options,
    *,
    out=None,
    resume=None,
    plot=None,
    device="cpu",
    prompt="def ",
    length=400,
    temperature=0.8,
    context_parallel=1,
):
    """The whole command: train, save, report, draw and sample.

    options: the TRAINING options and the files, which a checkpoint keeps.
    """
    try:
        of_run = options
        if resume is not None and context_parallel > 1:
            of_run = load(resume)["options"]
        with shared_by(context_parallel, of_run, device) as sharing:
            given = (out, resume, plot, device, prompt)
            _run(prepare(options, *given, sharing), prompt, length, temperature)
    except SharingError as error:
        raise TrainError(error) from None


def _run(prepared, prompt, length, temperature):
    training, data, first, out, plot = prepared
    sharing, device = training.sharing, training.device
    sharing.total(0)  # none begins before all are ready
    sharing.begin(training.model)
    o, path = training.options, out / CHECKPOINT
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    kept = data[first:]
    baselines = {
        "zlib -9": 8 * len(zlib.compress(kept, 9)) / len(kept),
        "lzma": 8 * len(lzma.compress(kept)) / len(kept),
    }
    size = sum(p.numel() for p in training.model.parameters())
    source = ", ".join(o["files"]) if len(o["files"]) < 3 else f"{len(o['files'])} files"
    print(
        f"{len(data):,} bytes of {source or demo.SOURCE}, the last {len(kept):,} held out\n"
        f"{o['layer']}, {size:,} parameters in all; {o['steps']:,} steps of "
        f"{o['batch']} x {o['context']} bytes on {device}\n",
        flush=True,
    )
    progress = train(training, text, data, first, path)
    bits = held_out_bits(training.model, text, first, o["context"], o["batch"], sharing=sharing)
    line = "{:<46}{:>8.3f}".format
    print(
        "\nheld out, bits per byte\n"
        + line(f"{o['layer']}, after {training.step * o['batch'] * o['context']:,} bytes", bits)
    )
    for name, value in baselines.items():
        print(line(f"{name} of the held-out bytes alone", value))
    print(
        "The model is "
        + " and ".join(
            f"{abs(bits - value):.3f} {'below' if bits < value else 'ABOVE'} {name}"
            for name, value in baselines.items()
        )
        + "."
    )
    if progress.tokens:
        print(
            f"\n{progress.tokens:,} bytes in {progress.seconds:,.0f} s of training, "
            f"{progress.tokens / progress.seconds:,.0f} tokens/s"
        )
    if sharing.rank:
        return
    sharing.end(training.model)  # the sample is this process's alone
    print(f"wrote {path}")
    if plot is not None:
        draw(plot, training, bits, baselines)
        print(f"wrote {plot}")
    if length:
        begin = time.perf_counter()
        made = sample(training.model, prompt.encode(), length, temperature, o["seed"])
        seconds = time.perf_counter() - begin
        print(
            f"\n{length} bytes by step, temperature {temperature:g}, "
            f"{length / seconds:,.0f} tokens/s:\n\n{prompt}{made.decode(errors='replace')}"
        )
