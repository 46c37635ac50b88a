"""python -m linattn demo and info, as a user runs them; train, as far as it goes without torch."""

import lzma
import os
import re
import socket as socketlib
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.variants import DELTA

import linattn as ours
from linattn.programs import demo


def linattn(*arguments, **keywords):
    return subprocess.run(
        [sys.executable, "-m", "linattn", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        **keywords,
    )


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.txt"
    path.write_bytes(Path(demo.__file__).read_bytes() + Path(__file__).read_bytes())
    return path


def bits_per_byte(output, name):
    row = next(line for line in output.splitlines() if line.startswith(name + "  "))
    return float(row.removeprefix(name).split()[0])


def test_the_table(small):
    done = linattn("demo", small, "--bytes", 20_000)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bar where there is no terminal
    data = small.read_bytes()[:20_000]
    counts = np.array([data.count(b) for b in set(data)]) / len(data)
    assert bits_per_byte(done.stdout, "order-0 entropy") == pytest.approx(
        -np.sum(counts * np.log2(counts)), abs=6e-4
    )
    assert bits_per_byte(done.stdout, "zlib -9") == pytest.approx(
        8 * len(zlib.compress(data, 9)) / len(data), abs=6e-4
    )
    assert bits_per_byte(done.stdout, "lzma") == pytest.approx(
        8 * len(lzma.compress(data)) / len(data), abs=6e-4
    )
    plain = bits_per_byte(done.stdout, "linear_attention")
    for name in demo.MEMORIES.keys() & {*DELTA, "rwkv7"}:
        assert bits_per_byte(done.stdout, name) < plain
    assert plain < bits_per_byte(done.stdout, "order-0 entropy")
    assert done.stdout.count(" yes\n") == len(demo.MEMORIES)


def test_only_the_memories_asked_for(small):
    done = linattn("demo", small, "--bytes", 3_000, "--memories", "kda,retention", "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert "\nkda  " in done.stdout and "\nretention  " in done.stdout
    assert "\ndelta_rule  " not in done.stdout


def test_plot(small, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    done = linattn("demo", small, "--bytes", 1_000, "--plot", path)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [b"x", b"ab", b"\xff" + b"abc" * 9, "äöü €\n".encode() * 30])
def test_short_and_unusual_text(tmp_path, content):
    path = tmp_path / "text"
    path.write_bytes(content)
    done = linattn("demo", path)
    assert done.returncode == 0, done.stderr


def refused(*arguments, **keywords):
    done = linattn("demo", *arguments, **keywords)
    assert done.returncode == 2
    assert done.stdout == ""  # before the run, not after it
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_bad_files(tmp_path, small):
    path = tmp_path / "bad"
    assert refused(path) == f"linattn demo: {path}: no such file\n"
    assert refused(small, path) == f"linattn demo: {path}: no such file\n"
    path.write_bytes(b"")
    assert refused(path) == f"linattn demo: {path}: the file is empty\n"
    binary = f"linattn demo: {path}: looks like a binary file, text is expected\n"
    path.write_bytes(b"text, but for\0one byte")
    assert refused(path) == binary
    path.write_bytes(b"text" + bytes(range(128, 256)))
    assert refused(path) == binary


def test_a_file_that_cannot_be_read(small, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", denied)  # file modes do not stop root
    with pytest.raises(demo.DemoError, match=r"small\.txt: cannot be read: Permission denied"):
        demo.read_text([small], 10)


@pytest.mark.timeout(60)  # a FIFO that is waited for never ends
def test_only_regular_files_are_read(tmp_path, small, monkeypatch):
    link, fifo, socket = (tmp_path / name for name in ("link", "fifo", "socket"))
    link.symlink_to(small)
    assert demo.read_text([link], None) == small.read_bytes()
    os.mkfifo(fifo)
    with monkeypatch.context() as patch, socketlib.socket(socketlib.AF_UNIX) as server:
        patch.chdir(tmp_path)  # an address has 107 bytes at most
        server.bind("socket")
    to_fifo = tmp_path / "to fifo"
    to_fifo.symlink_to(fifo)
    for path, got in (
        (fifo, "a FIFO"),
        (to_fifo, "a FIFO"),
        (tmp_path, "a directory"),
        (socket, "a socket"),
        ("/dev/zero", "a character device"),
    ):
        error = f"{path}: expected a regular file, got {got}"
        with pytest.raises(demo.DemoError, match=f"^{re.escape(error)}$"):
            demo.read_text([small, path], 10**6)  # with a limit: without one /dev/zero never ends
    assert refused(fifo) == f"linattn demo: {fifo}: expected a regular file, got a FIFO\n"


def test_files_are_let_go(tmp_path, small):
    before = os.listdir("/proc/self/fd")
    for path in (small, tmp_path, "/dev/null"):
        try:
            demo.read_text([path], 10)
        except demo.DemoError:
            pass
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_no_file_can_have_as_its_name(name):
    with pytest.raises(demo.DemoError, match="expected the name of a file, got what no file can"):
        demo.read_text([name], 10)


def test_text_has_a_largest_length(tmp_path, small, monkeypatch):
    size = small.stat().st_size
    other = tmp_path / "other.txt"
    other.write_bytes(b"text")
    monkeypatch.setattr(demo.files, "TEXT_LIMIT", size + 3)
    for limit in (None, 10**12):
        assert len(demo.read_text([small], limit)) == size
        with pytest.raises(demo.DemoError) as error:
            demo.read_text([small, other], limit)
        assert str(error.value) == (
            f"{other}: expected at most {size + 3:,} bytes in all, got {size + 4:,}"
        )
    assert len(demo.read_text([small, other], size + 2)) == size + 2  # enough was asked for
    assert len(demo.read_text([small, other], size + 3)) == size + 3


def test_a_long_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "long"
    with open(path, "wb") as file:
        file.truncate(demo.files.TEXT_LIMIT + 1)  # takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(demo.DemoError, match="at most 1,073,741,824 bytes in all, got "):
            demo.read_text([path], None)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    with pytest.raises(demo.DemoError, match="binary"):  # ten bytes are looked at, and no more
        demo.read_text([path], 10)


def test_a_file_that_is_longer_than_it_says(monkeypatch):
    path = Path("/proc/self/status")  # it says 0
    if not path.is_file() or path.stat().st_size:
        pytest.skip("no such file here")
    assert demo.read_text([path], None).startswith(b"Name:")
    monkeypatch.setattr(demo.files, "TEXT_LIMIT", 100)
    assert len(demo.read_text([path], 100)) == 100
    with pytest.raises(demo.DemoError, match="expected at most 100 bytes in all, got more"):
        demo.read_text([path], None)


def test_bad_options(small, tmp_path):
    assert "--memories: 'gru' is not one of linear_attention, retention" in refused(
        small, "--memories", "kda,gru"
    )
    assert "--seed: must be at least 0" in refused(small, "--seed", -1)
    for value in ("0", "-5", "many"):
        done = linattn("demo", small, "--bytes", value)
        assert done.returncode == 2 and "--bytes" in done.stderr
    pytest.importorskip("matplotlib")
    nowhere = tmp_path / "none" / "out.png"
    assert refused(small, "--plot", nowhere) == f"linattn demo: {nowhere}: cannot be written\n"
    assert "the name must end in one of" in refused(small, "--plot", tmp_path / "out.text")


@pytest.mark.timeout(60)  # a FIFO that is waited for never ends
def test_a_plot_replaces_a_link_and_waits_for_nothing(tmp_path, small):
    pytest.importorskip("matplotlib")
    precious, link, fifo = (tmp_path / name for name in ("precious", "link.png", "fifo.png"))
    precious.write_bytes(b"mine")
    link.symlink_to(precious)
    few = "--bytes", 1_000, "--memories", "kda,retention"
    assert linattn("demo", small, *few, "--plot", link).returncode == 0
    assert precious.read_bytes() == b"mine"
    assert not link.is_symlink() and link.read_bytes()[:4] == b"\x89PNG"
    os.mkfifo(fifo)
    assert refused(small, "--plot", fifo) == (
        f"linattn demo: {fifo}: expected a regular file, got a FIFO\n"
    )


def test_plot_without_matplotlib(small, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(demo.DemoError, match=r"pip install 'linattn\[plot\]'"):
        demo.run([small], plot_path=tmp_path / "out.png")


def test_a_failure_of_the_run_is_one_line(small, monkeypatch, capsys):
    from linattn import __main__

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(demo, "measure", fail)
    assert __main__.main(["demo", str(small)]) == 1
    assert capsys.readouterr().err == "linattn demo: out of memory\n"


def test_code_lengths_depend_on_earlier_bytes_only(small):
    data, same = small.read_bytes()[:3_000], 2_000
    changed = data[:same] + bytes(reversed(data[same:]))
    before, _ = demo.measure(data, demo.MEMORIES)
    after, _ = demo.measure(changed, demo.MEMORIES)
    for name in demo.MEMORIES:
        # the packing differs, and with it where the chunks of a sequence end: not bit-equal
        np.testing.assert_allclose(
            before[name]["bits"][:same], after[name]["bits"][:same], rtol=1e-3, atol=1e-3
        )
        assert np.abs(before[name]["bits"][same:] - after[name]["bits"][same:]).max() > 1


def test_the_decoder_is_causal_bit_for_bit():
    rng = np.random.default_rng(0)
    o = rng.standard_normal((1000, demo.H, demo.V)).astype(np.float32)
    text = rng.integers(0, 256, 1000).astype(np.uint8)
    bits = demo.Decoder().bits(o, np.arange(1000), text)
    for t in (255, 256, 700):
        other, other_text = o.copy(), text.copy()
        other[t + 1 :] = rng.standard_normal((999 - t, demo.H, demo.V))
        other_text[t + 1 :] = 7
        got = demo.Decoder().bits(other, np.arange(1000), other_text)
        np.testing.assert_array_equal(got[: t + 1], bits[: t + 1])


def test_code_lengths_are_those_of_a_distribution():
    """At every token the 256 probabilities 2**-bits add up to 1 (Kraft's equality)."""
    rng = np.random.default_rng(0)
    o = rng.standard_normal((600, demo.H, demo.V)).astype(np.float32)
    text = rng.integers(0, 256, 600).astype(np.uint8)
    total = 0.0
    for byte in range(256):
        text[-1] = byte
        total += 2 ** -demo.Decoder().bits(o, np.arange(600), text)[-1]
    assert total == pytest.approx(1, abs=1e-4)


def test_a_token_writes_only_what_is_known():
    """Token t writes the context and the byte of an earlier token of its own bucket."""
    stream = demo.Stream(b"abcabcabd" * 50, seed=0)
    q, k, v = (x[0] for x in stream.inputs(np.arange(450)))
    assert (stream.previous < np.arange(450)).all()
    for t, before in enumerate(stream.previous):
        if before < 0:
            assert not k[t].any() and not v[t].any()
        else:
            assert stream.bucket[before] == stream.bucket[t]
            np.testing.assert_array_equal(k[t], q[before])
            np.testing.assert_array_equal(v[t].argmax(-1), stream.text[before])
    np.testing.assert_allclose((q * q).sum(-1), 1, rtol=1e-5)


def test_the_memory_of_rwkv_7_is_linattns():
    """The demo calls dplr_delta_rule, which the reference has in chunks too."""
    stream = demo.Stream(Path(__file__).read_bytes()[:600], seed=0)
    _, inputs, starts = stream.packed(0, 600)
    o, _ = demo.chunked(ours, "rwkv7", inputs, starts)
    q, k, v = inputs
    g = np.broadcast_to(demo.MEMORIES["rwkv7"]["g"], k.shape)
    a = np.full(k.shape, demo.RATE)
    again, _ = ours.rwkv7(q, g, demo.RATE * k, v, a, kk=k, cu_seqlens=starts)
    np.testing.assert_array_equal(o, again[0])


def test_info():
    done = linattn("info")
    assert done.returncode == 0, done.stderr
    for key in ("linattn", "compiler", "instruction sets", "threads", "cuda"):
        assert key in done.stdout.lower()


def test_train_without_pytorch():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['torch'] = None; from linattn.__main__ "
            "import main; sys.exit(main(['train']))",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "linattn train: needs PyTorch: pip install 'linattn[train]'\n"


def test_train_says_what_it_takes():
    done = linattn("train", "--help")
    assert done.returncode == 0 and "(default: gated_delta_net)" in done.stdout
