"""python -m linattn train: small models, on this repository's own text."""

import errno
import io
import os
import pickle
import signal
import struct
import sys
import tracemalloc
import zipfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.device import imported

import linattn
from linattn import reference
from linattn.programs import demo
from linattn.programs.command_line import main
from linattn.programs.options import LAYERS, TRAINING
from linattn.testing import assert_accurate

torch = imported("torch")
train = pytest.importorskip("linattn.programs.train", reason="PyTorch is not installed")
F = torch.nn.functional

layers = pytest.mark.parametrize("layer", LAYERS)
SYSTEMS = "linattn.composed."  # whose modules call an op
SMALL = [
    "--d-model",
    32,
    "--head-dim",
    16,
    "--blocks",
    1,
    "--context",
    32,
    "--batch",
    2,
    "--held-out",
    0.02,
    "--sample",
    0,
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(Path(demo.__file__).read_bytes())
    return path


def command(*arguments):
    return main(["train", *map(str, arguments)])


def saved(directory):
    return torch.load(directory / "checkpoint.pt", weights_only=True)


def same(a, b):
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# ---- runs ----


def test_the_loss_falls_below_what_counting_bytes_gets(text, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        command(
            text, *SMALL, "--steps", 80, "--lr", 0.01, "--batch", 8, "--every", 20, "--out", out
        )
        == 0
    )
    run = saved(out)
    assert run["step"] == len(run["losses"]) == 80
    assert 7 < run["losses"][0] < 9  # knows nothing: 8 bits
    assert [step for step, _ in run["held_out"]] == [20, 40, 60, 80]
    assert run["held_out"][-1][1] < run["held_out"][0][1]
    assert np.mean(run["losses"][-20:]) < demo.order0_entropy(text.read_bytes()) - 0.2
    shown = capsys.readouterr().out
    assert shown.count("tokens/s") == 5 and "zlib -9 of the held-out bytes alone" in shown
    assert {path.name for path in out.iterdir()} <= {"checkpoint.pt", "loss.png"}


@layers
def test_every_layer_trains_and_speaks(layer, text, tmp_path, capsys):
    assert (
        command(
            text,
            *SMALL,
            "--steps",
            2,
            "--layer",
            layer,
            "--out",
            tmp_path / "out",
            "--sample",
            20,
            "--prompt",
            "import ",
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert f"\n{layer}, " in shown
    assert "20 bytes by step" in shown and "\nimport " in shown
    assert command("--resume", tmp_path / "out" / "checkpoint.pt", "--sample", 0) == 0


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(text, tmp_path, monkeypatch, capsys):
    options = [text, *SMALL, "--steps", 25, "--every", 10]
    assert command(*options, "--out", tmp_path / "whole") == 0

    step = train.Training.train_step

    def interrupted(self, *arguments):
        if self.step == 13:
            signal.raise_signal(signal.SIGINT)  # in the middle of a step
        step(self, *arguments)

    capsys.readouterr()
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(train.Training, "train_step", interrupted)
        assert command(*options, "--out", tmp_path / "parts") == 130
    assert signal.getsignal(signal.SIGINT) is before
    message, _, rest = capsys.readouterr().err.partition("python -m linattn train ")
    assert message == "linattn train: stopped after step 14 of 25; to go on: "
    assert saved(tmp_path / "parts")["step"] == 14
    torch.manual_seed(99)  # another process has other random numbers
    assert command(*rest.split()) == 0
    assert same(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    assert not same(
        saved(tmp_path / "parts")["model"],
        train.Training(saved(tmp_path / "whole")["options"], "cpu").model.state_dict(),
    )


def test_nothing_is_learnt_from_what_is_held_out(text, tmp_path):
    options = [*SMALL, "--held-out", 0.3, "--batch", 8, "--steps", 5]
    data = text.read_bytes()[:52]
    first = 36  # windows of 32 begin at 1 to 4, and many of them end where they may
    text.write_bytes(data)
    assert command(text, *options, "--out", tmp_path / "a") == 0
    text.write_bytes(data[:first] + b"~" * (52 - first))
    assert command(text, *options, "--out", tmp_path / "b") == 0
    text.write_bytes(data[: first - 1] + b"~" * (53 - first))
    assert command(text, *options, "--out", tmp_path / "c") == 0
    a, b, c = (saved(tmp_path / name) for name in "abc")
    assert same(a["model"], b["model"]) and a["losses"] == b["losses"]
    assert a["held_out"] != b["held_out"]
    assert not same(a["model"], c["model"])  # the rest is the training text


def test_the_rate_rises_and_falls():
    options = {name: default for name, (default, *_) in TRAINING.items()}
    training = train.Training(options | {"d_model": 64, "blocks": 1, "steps": 1000}, "cpu")
    rates = []
    for training.step in range(1000):
        rates.append(training.rate())
    assert np.argmax(rates) == 100 and rates[100] == options["lr"]
    assert np.all(np.diff(rates[:101]) > 0) and np.all(np.diff(rates[100:]) < 0)
    assert 0 < rates[0] < 0.02 * rates[100] and 0 < rates[-1] < 1e-4 * rates[100]


# ---- figures ----


def model(layer, dtype=None, blocks=2):
    torch.manual_seed(3)
    language = train.LanguageModel(layer, 32, 2, blocks)
    for block in language.blocks:  # which would be the identity
        for last in block.ends():
            torch.nn.init.normal_(last.weight, std=0.1)
    return language.to(dtype or torch.float32)


@pytest.mark.parametrize("n", [1, 31, 32, 100])
def test_every_held_out_byte_is_coded_once(n):
    language, T = model("delta_net"), 32
    text = torch.randint(256, (150,), dtype=torch.uint8)
    first, bits = 150 - n, 0.0
    for start in range(first, 150, T):
        window = text[start - 1 : start + T].long()[None]
        with torch.no_grad():
            logits, _ = language(window[:, :-1])
        chances = logits[0].double().log_softmax(-1)
        bits -= chances[range(len(chances)), window[0, 1:]].sum().item() / np.log(2)
    got = train.held_out_bits(language, text, first, T, batch=3)
    assert got == pytest.approx(bits / n, rel=1e-5)


class Spelled:
    """linattn's ops as the reference has them, at float64 or, naively, at float32."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __getattr__(self, name):
        def op(*arrays, **keywords):
            arrays = [x.detach().numpy() for x in arrays]
            for not_asked in (
                "cu_seqlens",
                "initial_state",
                "output_final_state",
                "mode",
                "chunk_size",
                "allow_tf32",
            ):
                assert keywords.pop(not_asked, None) in (None, True, "chunk")
            keywords.pop("state_v_first", None)  # the state is not looked at
            keywords = {
                key: x.detach().numpy() if isinstance(x, torch.Tensor) else x
                for key, x in keywords.items()
            }
            o, state = getattr(reference, name)(*arrays, **keywords, dtype=self.dtype)
            return torch.from_numpy(o.astype(self.dtype)), state

        return op


def spelled_attention(q, k, v, attn_mask, is_causal):
    assert attn_mask is None and is_causal
    logits = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(later, -torch.inf).softmax(-1) @ v


@layers
def test_steps_are_as_accurate_as_plain_numpy(layer, monkeypatch):
    """A prompt is read by forward, the rest by step: the logits of all, by the acceptance rule."""
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    language = model(layer)
    with torch.no_grad():
        prompt, states = language(tokens[:, :15])
        rest = [language.step(tokens[:, t], states) for t in range(15, 40)]
    got = torch.cat([prompt, torch.stack(rest, 1)], 1).numpy()
    homes = {sys.modules[getattr(train.layers, name).__module__] for name in train.layers.__all__}
    callers = [where for where in (train, *homes) if hasattr(where, "ops")]
    systems = [where for name, where in sys.modules.items() if name.startswith(SYSTEMS)]
    spelled = {}
    for dtype in (np.float64, np.float32):
        for where in callers:
            monkeypatch.setattr(where, "ops", Spelled(dtype))
        for where, op in product(systems, linattn.OPS):
            if hasattr(where, op):  # it has imported the op
                monkeypatch.setattr(where, op, getattr(Spelled(dtype), op))
        monkeypatch.setattr(F, "scaled_dot_product_attention", spelled_attention)
        with torch.no_grad():
            same_parameters = model(layer).to(torch.from_numpy(np.empty(0, dtype)).dtype)
            spelled[dtype] = same_parameters(tokens)[0].numpy()
    assert_accurate(got, spelled[np.float64], spelled[np.float32], dtype=np.float32, name=layer)


@layers
def test_the_sample_is_what_the_model_says(layer):
    language, prompt = model(layer, torch.float64), b"def "
    made = train.sample(language, prompt, 8, temperature=0)
    for i in range(8):
        seen = torch.tensor([list(prompt + made[:i])])
        with torch.no_grad():
            assert language(seen)[0][0, -1].argmax() == made[i]


def test_temperature():
    language = model("retention")
    cold, warm, warm_again, other = (
        train.sample(language, b"x", 50, *how) for how in ((1e-6,), (1.0, 1), (1.0, 1), (1.0, 2))
    )
    assert cold == train.sample(language, b"x", 50, 0)
    assert warm == warm_again != other


# ---- files ----


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    text, tmp_path, monkeypatch, capsys
):
    out, save, times = tmp_path / "out", torch.save, []

    def full(what, file):
        times.append(file)
        if len(times) == 2:
            made = io.BytesIO()
            save(what, made)
            file.write(made.getvalue()[:1000])
            raise OSError(errno.ENOSPC, "No space left on device")
        save(what, file)

    monkeypatch.setattr(torch, "save", full)
    assert command(text, *SMALL, "--steps", 9, "--every", 3, "--out", out) == 1
    assert capsys.readouterr().err == "linattn train: [Errno 28] No space left on device\n"
    assert saved(out)["step"] == 3
    assert [path.name for path in out.iterdir()] == ["checkpoint.pt"]
    monkeypatch.setattr(torch, "save", save)
    assert command("--resume", out / "checkpoint.pt", "--sample", 0) == 0
    assert saved(out)["step"] == 9


def test_no_link_is_followed_to_write_a_checkpoint(text, tmp_path):
    """Neither one that lies at the checkpoint's name, nor one that waits for the new file."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    out.mkdir()
    mine.write_bytes(b"mine")
    for name in ("checkpoint.pt.part", f"checkpoint.pt.{os.getpid()}.part"):
        (out / name).symlink_to(mine)
    options = [text, *SMALL, "--steps", 2, "--every", 1]
    assert command(*options, "--out", out) == 0
    path = out / "checkpoint.pt"
    assert saved(out)["step"] == 2 and not path.is_symlink()
    assert mine.read_bytes() == b"mine"

    whole = tmp_path / "whole.pt"
    path.rename(whole)
    path.symlink_to(whole)
    before = whole.read_bytes()
    with train.files.replaced(path) as file:
        file.write(b"new")
    assert whole.read_bytes() == before
    assert path.read_bytes() == b"new" and not path.is_symlink()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002, 0])
def test_a_checkpoint_has_the_rights_of_any_new_file(mask, tmp_path):
    before = os.umask(mask)
    try:
        with train.files.replaced(tmp_path / "checkpoint.pt") as file:
            file.write(b"new")
        (tmp_path / "plain").write_bytes(b"new")
        assert os.umask(mask) == mask  # as it was
    finally:
        os.umask(before)
    made, plain = ((tmp_path / name).stat().st_mode for name in ("checkpoint.pt", "plain"))
    assert made == plain


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
def test_a_write_that_fails_leaves_nothing(error, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"old")

    def fail(*_):
        raise error

    for where in ("write", "replace"):
        with pytest.raises(error), monkeypatch.context() as patch:
            if where == "replace":
                patch.setattr(os, "replace", fail)
            with train.files.replaced(path) as file:
                file.write(b"new")
                if where == "write":
                    fail()
        assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_the_loss_curve(text, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = [text, *SMALL, "--steps", 3]
    assert command(*options, "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert command(*options, "--out", tmp_path / "b", "--plot", tmp_path / "curve.svg") == 0
    assert b"<svg" in (tmp_path / "curve.svg").read_bytes()
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["checkpoint.pt"]


# ---- errors ----


@pytest.fixture
def refused(capsys):
    def refused(*arguments):
        capsys.readouterr()
        assert command(*arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1
        return shown.err.removeprefix("linattn train: ").rstrip()

    return refused


def test_what_cannot_be_trained_on(refused, tmp_path, text):
    out = ["--out", tmp_path / "out"]
    assert refused(tmp_path / "none", *out) == f"{tmp_path / 'none'}: no such file"
    text.write_bytes(b"short" * 50)
    assert refused(text, *out) == (
        "the text is too short: 250 bytes, of which 238 to learn from; "
        "--context 256 takes one more than that"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(120)  # a FIFO that is waited for never ends
def test_only_regular_files_are_read(refused, tmp_path):
    fifo, out = tmp_path / "fifo", tmp_path / "out"
    os.mkfifo(fifo)
    for path, got in (
        (fifo, "a FIFO"),
        (tmp_path, "a directory"),
        ("/dev/null", "a character device"),
    ):
        error = f"{path}: expected a regular file, got {got}"
        assert refused(path, "--out", out) == error
        assert refused("--resume", path) == f"--resume {error}"
    assert not out.exists()


def test_a_checkpoint_has_a_largest_length(refused, tmp_path, text, monkeypatch):
    path = tmp_path / "long"
    with open(path, "wb") as file:
        file.truncate(train.files.CHECKPOINT_LIMIT + 1)  # takes no room on the disk
    assert refused("--resume", path) == (
        f"--resume {path}: expected at most 17,179,869,184 bytes in all, got 17,179,869,185"
    )
    options = [text, *SMALL, "--steps", 1, "--out"]
    assert command(*options, tmp_path / "out") == 0
    size = (tmp_path / "out" / "checkpoint.pt").stat().st_size
    monkeypatch.setattr(train.files, "CHECKPOINT_LIMIT", size // 2)
    assert "the model is too large: its checkpoint has " in refused(*options, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_pickle_that_makes_more_than_the_file_holds(refused, tmp_path):
    """PyTorch lets bytearray(n) pass with weights_only."""
    whole, path = tmp_path / "whole.pt", tmp_path / "made.pt"
    torch.save({"format": "linattn train 1"}, whole)
    size = struct.pack("<q", 6 << 30)
    pickled = b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + size + b"\x85R."
    with zipfile.ZipFile(whole) as parts, zipfile.ZipFile(path, "w") as made:
        for part in parts.infolist():
            is_pickle = part.filename.endswith("data.pkl")
            made.writestr(part.filename, pickled if is_pickle else parts.read(part))
    tracemalloc.start()
    error = refused("--resume", path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error == f"--resume {path}: not a checkpoint of python -m linattn train"
    assert most < 2**24


@pytest.mark.timeout(120)
def test_a_loss_curve_replaces_a_link(tmp_path, text):
    pytest.importorskip("matplotlib")
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.write_bytes(b"mine")
    out.mkdir()
    (out / "loss.png").symlink_to(precious)
    assert command(text, *SMALL, "--steps", 1, "--out", out) == 0
    assert precious.read_bytes() == b"mine"
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_options_that_do_not_fit(refused, tmp_path, text, monkeypatch):
    out = ["--out", tmp_path / "out"]
    for head_dim in (24, 32 + 1):
        assert refused(text, *SMALL, *out, "--head-dim", head_dim) == (
            f"--head-dim: expected an even number that divides --d-model 32, got {head_dim}"
        )
    assert refused(text, *SMALL, "--out", text) == f"--out {text}: File exists"
    assert refused(text, *SMALL, *out, "--prompt", "") == "--prompt: expected at least one byte"
    if not torch.cuda.is_available():
        assert refused(text, *SMALL, *out, "--device", "cuda") == (
            "--device cuda: PyTorch finds no GPU"
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert refused(text, *SMALL, *out, "--device", "cuda") == (
            f"--device cuda: {linattn.cuda.why_not()}"
        )
    for wrong in (
        ["--layer", "lstm"],
        ["--steps", 0],
        ["--lr", "nan"],
        ["--lr", 0],
        ["--held-out", 1],
        ["--temperature", -1],
        ["--temperature", "nan"],
        ["--sample", -1],
        ["--seed", -1],
        ["--seed", 2**70],
        ["--batch", 2**70],
    ):
        with pytest.raises(SystemExit, match="2"):
            command(text, *wrong)


def test_what_cannot_be_gone_on_with(refused, tmp_path, text):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harm",)

    out, path = tmp_path / "out", tmp_path / "out" / "checkpoint.pt"
    assert refused("--resume", path) == f"--resume {path}: no such file"
    assert command(text, *SMALL, "--steps", 2, "--out", out) == 0
    assert refused(text, *SMALL, "--out", out) == (
        f"{path} is there already: go on with it (--resume {path}), or choose another directory "
        "(--out)"
    )
    assert refused("--resume", path, "--lr", 1) == "--lr: with --resume it is the checkpoint's"
    assert refused(text, "--resume", path) == "FILE: with --resume it is the checkpoint's"
    text.write_bytes(text.read_bytes().replace(b"the", b"THE"))
    assert refused("--resume", path) == f"--resume {path}: the text is not what it was trained on"

    whole = path.read_bytes()
    not_one = f"--resume {path}: not a checkpoint of python -m linattn train"
    for content in (b"", b"text", whole[:-1000], whole[1000:], pickle.dumps(Harm(), 2)):
        path.write_bytes(content)
        assert refused("--resume", path) == not_one
    for content in ({}, [1], 3, {"format": "linattn train 0"}, {"harm": Harm()}):
        torch.save(content, path)
        assert refused("--resume", path) == not_one
    assert not (tmp_path / "harm").exists()


def without(*path):
    def change(run):
        *outer, last = path
        for key in outer:
            run = run[key]
        del run[last]

    return change


def replaced(value, *path):
    def change(run):
        *outer, last = path
        for key in outer:
            run = run[key]
        run[last] = value

    return change


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A checkpoint of two steps, as bytes."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").write_bytes(Path(demo.__file__).read_bytes())
    assert (
        command(folder / "text", *SMALL, "--steps", 3, "--every", 2, "--out", folder / "out") == 0
    )
    return (folder / "out" / "checkpoint.pt").read_bytes()


Z = torch.zeros
KEY, WHERE = "embedding.weight", ("optimizer", "state", 0)
UNFIT = [
    *(
        (without(name), f"expected {name} in it, got none")
        for name in (
            "options",
            "text",
            "model",
            "optimizer",
            "step",
            "losses",
            "held_out",
            "batches",
            "random",
            "random_cuda",
        )
    ),
    (
        replaced([], "options"),
        "expected options in it to be of type dict, got something of type list",
    ),
    (replaced(True, "step"), "expected step in it to be of type int, got True"),
    (replaced(3.0, "step"), "expected step in it to be of type int, got 3.0"),
    (replaced(4, "step"), "expected step to lie between 0 and 3, got 4"),
    (replaced(-1, "step"), "expected step to lie between 0 and 3, got -1"),
    (replaced(2, "step"), "expected 2 losses, got 3"),
    (replaced("1", "losses", 0), "expected losses that are finite numbers, got '1'"),
    (replaced(float("nan"), "losses", 2), "expected losses that are finite numbers, got nan"),
    (replaced([], "held_out"), "expected held_out to have the figures of 2 steps, got those of 0"),
    (replaced([3, 4], "held_out"), "expected held_out to be a list of steps and figures, got 3"),
    (
        replaced([1], "text"),
        "expected text to be a length and a checksum, got something of type list",
    ),
    # options
    (without("options", "blocks"), "expected blocks in options, got none"),
    (without("options", "files"), "expected files in options, got none"),
    (replaced("2", "options", "blocks"), "expected blocks in options to be of type int, got '2'"),
    (replaced(0, "options", "blocks"), "the option blocks must be at least 1, got 0"),
    (
        replaced(2**70, "options", "batch"),
        "the option batch must be at most 9223372036854775807, got something of type int",
    ),
    (replaced(float("nan"), "options", "lr"), "the option lr must lie between 0 and inf, got nan"),
    (replaced(1, "options", "held_out"), "the option held_out must lie between 0 and 1, got 1"),
    (
        replaced("lstm", "options", "layer"),
        f"expected the option layer to be one of {', '.join(LAYERS)}, got 'lstm'",
    ),
    (
        replaced([b"text"], "options", "files"),
        "expected the option files to be a list of names, got something of type bytes",
    ),
    (
        replaced(24, "options", "head_dim"),
        "--head-dim: expected an even number that divides --d-model 32, got 24",
    ),
    # shapes: by the options, and in the file
    (
        replaced(64, "options", "d_model"),
        f"expected {KEY} in model to be float32 (256, 64), got float32 (256, 32)",
    ),
    (
        replaced(2**40, "options", "d_model"),
        f"expected {KEY} in model to be float32 (256, {2**40}), got float32 (256, 32)",
    ),
    (replaced(10**9, "options", "blocks"), "expected 1000000000 blocks, got 19 tensors"),
    (replaced(2, "options", "blocks"), "expected blocks.1.mixer_norm.weight in model, got none"),
    (
        replaced("kda", "options", "layer"),
        "expected blocks.0.mixer.dt_bias in model to be float32 (32,), got float32 (2,)",
    ),
    (without("model", KEY), f"expected {KEY} in model, got none"),
    (replaced(Z(1), "model", "other"), "expected the tensors of gated_delta_net, got 'other'"),
    (replaced(None, "model", KEY), f"expected {KEY} in model to be of type Tensor, got None"),
    (
        replaced(Z(256, 32).half(), "model", KEY),
        f"expected {KEY} in model to be float32 (256, 32), got float16 (256, 32)",
    ),
    (
        replaced(Z(256, 32).to_sparse(), "model", KEY),
        f"expected {KEY} in model to be float32 (256, 32), got float32 (256, 32) sparse_coo",
    ),
    (
        replaced(Z(256, 32, device="meta"), "model", KEY),
        f"expected {KEY} in model to be float32 (256, 32), got float32 (256, 32) on meta",
    ),
    (replaced(Z(1, 1).expand(256, 32), "model", KEY), f"expected {KEY} in model to be "),
    # the optimizer
    (without("optimizer", "state"), "expected state in optimizer, got none"),
    (without("optimizer", "state", 0), "expected the moments of 19 parameters, got 18"),
    (replaced({}, "optimizer", "state"), "expected the moments of 19 parameters, got 0"),
    (replaced(1, *WHERE), "expected 0 in optimizer to be of type dict, got 1"),
    (without(*WHERE, "exp_avg"), "expected exp_avg in optimizer 0, got none"),
    (
        replaced(Z(3), *WHERE, "exp_avg_sq"),
        "expected exp_avg_sq in optimizer 0 to be float32 (256, 32), got float32 (3,)",
    ),
    (replaced(3, *WHERE, "step"), "expected step in optimizer 0 to be of type Tensor, got 3"),
    # random numbers
    (
        replaced(Z(3), "batches"),
        "expected batches to be the state of a generator, got float32 (3,)",
    ),
    (
        replaced(Z(9).byte(), "random"),
        "expected random to be the state of a generator, got uint8 (9,)",
    ),
    (
        replaced([Z(3)], "random_cuda"),
        "expected random_cuda to be the states of generators, got float32 (3,)",
    ),
]


@pytest.mark.parametrize(("change", "message"), UNFIT, ids=[message for _, message in UNFIT])
def test_a_checkpoint_that_does_not_fit(change, message, refused, a_run, tmp_path):
    path = tmp_path / "checkpoint.pt"
    run = torch.load(io.BytesIO(a_run), weights_only=True)
    change(run)
    torch.save(run, path)
    before = path.read_bytes()
    assert refused("--resume", path).startswith(f"--resume {path}: {message}")
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_every_byte_that_changes_is_noticed(refused, a_run, tmp_path):
    """Of the tensors and the rest, not of the gaps between them."""
    path = tmp_path / "checkpoint.pt"
    with zipfile.ZipFile(io.BytesIO(a_run)) as archive:
        parts = [part for part in archive.infolist() if part.file_size]
    for part in parts:
        name, extra = (
            int.from_bytes(a_run[part.header_offset + i : part.header_offset + i + 2], "little")
            for i in (26, 28)
        )
        start = part.header_offset + 30 + name + extra
        changed = bytearray(a_run)
        changed[start + part.file_size // 2] ^= 1
        path.write_bytes(changed)
        assert refused("--resume", path) == (
            f"--resume {path}: expected the bytes that were "
            f"written, got others in {part.filename!r}"
        )


def test_a_checkpoint_is_no_larger_than_its_file(refused, a_run, tmp_path):
    path = tmp_path / "checkpoint.pt"
    with (
        zipfile.ZipFile(io.BytesIO(a_run)) as archive,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for part in archive.infolist():
            packed.writestr(part.filename, archive.read(part))
    assert torch.load(path, weights_only=True)["step"] == 3  # PyTorch unpacks it
    assert refused("--resume", path).endswith("not a checkpoint of python -m linattn train")


def test_the_groups_of_an_optimizer_are_the_options_to_make(text, tmp_path):
    options = [text, *SMALL, "--steps", 4, "--every", 2, "--out"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert command(*options, whole) == 0
    halfway = train.Training.save
    with pytest.MonkeyPatch.context() as patch:

        def save(self, path, data):
            halfway(self, path, data)
            raise KeyboardInterrupt

        patch.setattr(train.Training, "save", save)
        assert command(*options, parts) == 130
    run = saved(parts)
    for group in run["optimizer"]["param_groups"]:
        group.update(weight_decay="much", betas=None, fused=False)
    torch.save(run, parts / "checkpoint.pt")
    assert command("--resume", parts / "checkpoint.pt", "--sample", 0) == 0
    assert same(saved(parts), saved(whole))


def test_a_checkpoint_before_the_first_step(text, tmp_path):
    options = {name: default for name, (default, *_) in TRAINING.items()}
    options |= {"files": [str(text)], "d_model": 32, "head_dim": 16, "steps": 5}
    train.Training(options, "cpu").save(tmp_path / "checkpoint.pt", text.read_bytes())
    assert train.load(tmp_path / "checkpoint.pt")["step"] == 0


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path, capsys):
    out = tmp_path / "out"
    assert command(text, *SMALL, "--steps", 30, "--lr", 1e30, "--out", out) == 1
    assert capsys.readouterr().err == (
        "linattn train: the loss at step 10 is not finite: try a smaller --lr\n"
    )
    assert not list(out.iterdir())


def test_the_command_knows_the_layers():
    assert list(LAYERS) == list(train.MIXERS)
