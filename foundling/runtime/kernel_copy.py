"""Bytes of one file that are wanted in another as they are: the kernel copies them by itself.

A `write` from mapped memory takes up to three times as long as the kernel's own copy, which needs
no page table and moves what it has in pieces of its own choice.
"""

import errno
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

PAGE = 4096
"""Large tensors begin at a multiple of this in files of ours: the kernel then copies whole pages,
in two thirds of the time. The same on every machine, so that files are."""
LARGE = 1 << 20
"""Bytes that are worth a thread, or a place of their own."""
ALIGNED = 64
"""Bytes to a multiple of which the numbers of smaller tensors begin: torch's own measure."""
CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
"""What kernels and file systems say that do not do this."""


class Span(NamedTuple):
    """A part of a file."""

    path: Path
    start: int
    size: int


def evenness(size: int) -> int:
    """To a multiple of how many bytes a tensor's numbers begin in a checkpoint's file."""
    return PAGE if size >= LARGE else ALIGNED


def append(span: Span, file: BinaryIO) -> bool:
    """Write a part of another file where an open file now stands; False, and nothing was written,
    where that has to be done by hand."""
    if not span.size:
        return False
    file.flush()
    with open(span.path, "rb") as source:
        return copied(source.fileno(), span, file.fileno())


def copied(source: int, span: Span, target: int, place: int | None = None) -> bool:
    """`append` from an open file to a place of another one, or to where that stands."""
    if not hasattr(os, "copy_file_range"):
        return False
    done = 0
    while done < span.size:
        to = None if place is None else place + done
        try:
            length = os.copy_file_range(source, target, span.size - done, span.start + done, to)
        except OSError as error:
            if done or error.errno not in CANNOT:
                raise
            return False
        if not length and not done:  # some file systems say so instead of refusing
            return False
        if not length:
            raise OSError(errno.EIO, f"{span.path} became shorter while it was copied")
        done += length
    return True
