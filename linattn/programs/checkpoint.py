"""Which checkpoints of `python -m linattn train` a run can go on with.

A file may come from anywhere, so all of it is checked before a run begins. Nothing in it is
executed, and nothing in it takes more memory than the file is long.
"""

import argparse
import errno
import math
import os
import pickletools
import re
import reprlib
import warnings
import zipfile

import torch

from linattn.programs import files
from linattn.programs.options import LAYERS, TRAINING

FORMAT = "linattn train 1"
NOT_ONE = "not a checkpoint of python -m linattn train"

# The parts of a checkpoint beside its format, and their types.
KINDS = {
    "options": dict,
    "text": list,
    "model": dict,
    "optimizer": dict,
    "step": int,
    "losses": list,
    "held_out": list,
    "batches": torch.Tensor,
    "random": torch.Tensor,
    "random_cuda": list,
}


class CheckpointError(Exception):
    """A message for the user: the file, the expectation, the finding."""


def load(path, skeleton):
    """The checkpoint at `path`, on the CPU.

    skeleton(options) makes the model and its optimizer's groups of parameters, without memory, or
    raises CheckpointError.
    """
    try:
        with warnings.catch_warnings(), files.opened(path, files.CHECKPOINT_LIMIT) as file:
            warnings.simplefilter("ignore")  # a file that is not a checkpoint may cause some
            damaged = damage(file)
            saved = None if damaged else load_plain(file)
    except files.FileError as error:
        raise CheckpointError(error) from None
    except MemoryError:
        raise
    except Exception:  # a file that is not a checkpoint may fail in any way
        raise CheckpointError(f"{path}: {NOT_ONE}") from None
    if damaged:
        raise CheckpointError(
            f"{path}: expected the bytes that were written, got others in {damaged!r}"
        )
    if not isinstance(saved, dict) or described(saved.get("format")) != repr(FORMAT):
        raise CheckpointError(f"{path}: {NOT_ONE}")
    try:
        check(saved, skeleton)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return saved


# The functions that a checkpoint's pickle may call, of those that PyTorch allows with weights_only:
# they make no more than the file holds. Another one, bytearray, makes gigabytes of 800 bytes.
CALLED = re.compile(r"torch(\.\w+)* \w+|collections (OrderedDict|Counter)|_codecs encode")


def load_plain(file):
    """torch.load of a file whose pickle makes nothing but containers, numbers and tensors."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (part for part in archive.namelist() if part.endswith("/data.pkl"))
        with archive.open(name) as pickled:
            for opcode, argument, _ in pickletools.genops(pickled):
                if opcode.name == "STACK_GLOBAL" or (
                    opcode.name in ("GLOBAL", "INST") and not CALLED.fullmatch(argument)
                ):
                    raise CheckpointError(NOT_ONE)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def damage(file):
    """The first part of the archive whose checksum is wrong, or None. PyTorch checks none."""
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            # PyTorch compresses no part. A compressed one could be short and still fill the memory.
            if (
                any(part.compress_type != zipfile.ZIP_STORED for part in parts)
                or sum(part.file_size for part in parts) > os.fstat(file.fileno()).st_size
            ):
                raise CheckpointError(NOT_ONE)
            damaged = archive.testzip()
    except OSError as error:
        if error.errno == errno.EINVAL:  # its table names a place before the file's first byte
            raise CheckpointError(NOT_ONE) from None
        raise
    file.seek(0)
    return damaged


def check(saved, skeleton):
    """Raise CheckpointError, with the expectation and the finding, if no run can use this."""
    for name, kind in KINDS.items():
        expect_item(name, saved, "it", kind)
    check_options(saved["options"])
    check_progress(saved)
    o = saved["options"]
    # a skeleton takes no memory, but time: the two things that make it large are checked first
    expect_tensor("embedding.weight", saved["model"], "model", torch.float32, (256, o["d_model"]))
    expect(
        o["blocks"] <= len(saved["model"]),
        f"{o['blocks']} blocks",
        f"{len(saved['model'])} tensors",
    )
    model, groups = skeleton(o)
    check_model(saved["model"], model.state_dict(), o["layer"])
    check_moments(saved, [p for group in groups for p in group["params"]])
    check_random(saved)


def check_options(options):
    for name, (default, parse, *_) in TRAINING.items():
        expect_item(name, options, "options", type(default))
        try:
            parse(str(options[name]))
        except argparse.ArgumentTypeError as error:
            raise CheckpointError(
                f"the option {name} {error}, got {described(options[name])}"
            ) from None
    expect(
        options["layer"] in LAYERS,
        f"the option layer to be one of {', '.join(LAYERS)}",
        described(options["layer"]),
    )
    expect_item("files", options, "options", list)
    for path in options["files"]:
        expect(type(path) is str, "the option files to be a list of names", described(path))


def check_progress(saved):
    o, step, losses = saved["options"], saved["step"], saved["losses"]
    expect(0 <= step <= o["steps"], f"step to lie between 0 and {o['steps']}", described(step))
    expect(len(losses) == step, f"{step} losses", f"{len(losses)}")
    for loss in losses:
        expect(
            type(loss) is float and math.isfinite(loss),
            "losses that are finite numbers",
            described(loss),
        )
    figures = saved["held_out"]
    for figure in figures:
        expect(
            isinstance(figure, tuple) and list(map(type, figure)) == [int, float],
            "held_out to be a list of steps and figures",
            described(figure),
        )
    due = [n for n in range(1, step + 1) if n % o["every"] == 0 or n == o["steps"]]
    expect(
        [n for n, _ in figures] == due,
        f"held_out to have the figures of {len(due)} steps",
        f"those of {len(figures)}",
    )
    expect(
        list(map(type, saved["text"])) == [int, int],
        "text to be a length and a checksum",
        described(saved["text"]),
    )


def check_model(model, made, layer):
    for name, x in made.items():
        expect_tensor(name, model, "model", x.dtype, x.shape)
    for name in model:
        expect(name in made, f"the tensors of {layer}", described(name))


def check_moments(saved, parameters):
    expect_item("state", saved["optimizer"], "optimizer", dict)
    state = saved["optimizer"]["state"]
    due = range(len(parameters) if saved["step"] else 0)
    expect(state.keys() == set(due), f"the moments of {len(due)} parameters", f"{len(state)}")
    for i in due:
        expect_item(i, state, "optimizer", dict)
        for name, shape in (
            ("step", ()),
            ("exp_avg", parameters[i].shape),
            ("exp_avg_sq", parameters[i].shape),
        ):
            expect_tensor(name, state[i], f"optimizer {i}", torch.float32, shape)


def check_random(saved):
    for name in ("batches", "random"):
        try:
            torch.Generator().set_state(saved[name])
        except (RuntimeError, TypeError, ValueError):
            expect(False, f"{name} to be the state of a generator", described(saved[name]))
    for x in saved["random_cuda"]:
        expect(
            isinstance(x, torch.Tensor) and x.dtype == torch.uint8 and x.dim() == 1,
            "random_cuda to be the states of generators",
            described(x),
        )


def expect(fits, expected, got):
    """Raise CheckpointError unless `fits`."""
    if not fits:
        raise CheckpointError(f"expected {expected}, got {got}")


def expect_item(name, among, where, kind):
    """Raise unless among[name] is of this kind. An int is a float too, but a bool is no int."""
    expect(name in among, f"{name} in {where}", "none")
    x = among[name]
    kinds = (int, float) if kind is float else kind
    expect(
        isinstance(x, kinds) and not isinstance(x, bool),
        f"{name} in {where} to be of type {kind.__name__}",
        described(x),
    )


def expect_tensor(name, among, where, dtype, shape):
    """Raise unless among[name] is a tensor of this dtype and shape.

    It must be dense. A dense tensor takes no more memory than the file is long.
    """
    expect_item(name, among, where, torch.Tensor)
    x = among[name]
    expect(
        x.dtype == dtype
        and x.shape == shape
        and x.layout == torch.strided
        and x.device.type == "cpu"
        and x.is_contiguous(),
        f"{name} in {where} to be {tensor(dtype, shape)}",
        tensor(x.dtype, x.shape, x.layout, x.device.type),
    )


def tensor(dtype, shape, layout=torch.strided, device="cpu"):
    """A tensor in words."""
    odd = [] if layout == torch.strided else [str(layout).removeprefix("torch.")]
    odd += [] if device == "cpu" else [f"on {device}"]
    return " ".join([str(dtype).removeprefix("torch."), str(tuple(shape)), *odd])


def described(x):
    """Any object in a few words on one line."""
    if isinstance(x, torch.Tensor):
        return tensor(x.dtype, x.shape, x.layout, x.device.type)
    if isinstance(x, str):
        return reprlib.repr(x)
    if x is None or isinstance(x, bool | float) or (isinstance(x, int) and abs(x) < 2**64):
        return repr(x)
    return f"something of type {type(x).__name__}"
