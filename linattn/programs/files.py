"""The files that `python -m linattn` reads and writes.

It reads regular files of a bounded length. It writes the whole of a file or nothing.
"""

import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path

# Bytes of text in all. enwik9, the longest text that models of bytes are usually compared on, has
# 10^9. Training holds five times as much for a while: the text, and up to 4 bytes for each of its
# characters while it is decoded. The longest usual text moves this number.
TEXT_LIMIT = 2**30

# Bytes of a checkpoint. A parameter takes 12: 4 of its own, 8 of AdamW's two moments. So there is
# room for 1.4e9 parameters, a thousand times the number of the default model. The largest model
# that one GPU trains in float32 moves this number.
CHECKPOINT_LIMIT = 2**34

PIECE = 2**20  # bytes of a read: a short file then takes little memory, however much is asked for

KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class FileError(Exception):
    """A message for the user: the file, the expectation, the finding."""


@contextmanager
def opened(path, limit=None, before=0):
    """The regular file at `path`, open for reading.

    It is refused if it has more than `limit` bytes, with those that were read `before` from other
    files. The check is of the open file: no other file can take its place between the check and
    the reads.
    """
    fd = descriptor(path)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise not_regular(path, found.st_mode)
        if limit is not None and before + found.st_size > limit:
            raise too_long(path, limit, f"{before + found.st_size:,}")
        with os.fdopen(fd, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None
    finally:
        os.close(fd)


def descriptor(path):
    """A descriptor of the file, or FileError."""
    try:
        # without O_NONBLOCK the call waits for a FIFO's writer
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except OSError as error:
        if is_socket(path):  # a socket cannot be opened
            raise not_regular(path, stat.S_IFSOCK) from None
        raise unreadable(path, error) from None
    except ValueError:  # a NUL, or half a character
        raise FileError(
            f"{str(path)!r}: expected the name of a file, got what no file can have as its name"
        ) from None


def read(path, wanted, limit, before=0):
    """The first `wanted` bytes of a file, or all of them if `wanted` is None.

    With the bytes `before`, they are at most `limit`. The length that the system reports cannot
    show that: a file can grow, and a file in /proc has a length of 0.
    """
    room = limit - before
    is_bounded = wanted is not None and wanted <= room
    left, parts = wanted if is_bounded else room + 1, []
    with opened(path, None if is_bounded else limit, before) as file:
        while left and (part := file.read(min(left, PIECE))):
            parts.append(part)
            left -= len(part)
    if not left and not is_bounded:
        raise too_long(path, limit, "more")
    return b"".join(parts)


@contextmanager
def replaced(path):
    """A file to write, which takes the place of the one at `path` when the block ends.

    If the block fails, `path` is as it was and no other file is left. The name of the new file
    cannot be predicted, so no link can be there beforehand. A link at `path` is replaced, not
    followed.
    """
    path = Path(path)
    fd, made = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, 0o666 & ~umask())  # the mode of open(); mkstemp's is for the owner only
            yield file
        os.replace(made, path)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise


def save_figure(figure, path):
    """Write a figure of matplotlib's; the end of the name says in which format."""
    with replaced(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:].lower(), dpi=130)


def expect_replaceable(path):
    """Raise FileError unless `path` is free, a regular file or a link: these can be replaced."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise not_regular(path, mode)


def umask():
    """The umask of the process. The system tells it only when it is set."""
    mask = os.umask(0o077)  # until the next line, a new file of another thread has too few rights
    os.umask(mask)
    return mask


def is_socket(path):
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def not_regular(path, mode):
    kind = next((name for is_one, name in KINDS if is_one(mode)), "a file of another kind")
    return FileError(f"{path}: expected a regular file, got {kind}")


def unreadable(path, error):
    return FileError(f"{path}: cannot be read: {error.strerror or error}")


def too_long(path, limit, got):
    return FileError(f"{path}: expected at most {limit:,} bytes in all, got {got}")
