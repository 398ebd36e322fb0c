"""The archive that `torch.save` makes of one plain tensor, without torch.

A zip file that is not compressed: a pickle that says how the numbers lie, the numbers, and two
records of the format itself. Its frame is made before the numbers are there, so that these can be
copied into it while torch is still being imported. Tests load it with torch and compare.
"""

import math
import pickle
import struct
import zlib
from typing import NamedTuple

STORAGES = {"F64": "Double", "F32": "Float", "F16": "Half", "BF16": "BFloat16"}
"""torch's classes of numbers by their names in safetensors."""
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
LARGEST = 0xF0000000
"""Bytes of a tensor; a larger archive would need the fields that zip files got later."""
_UTF8 = 0x800


class Frame(NamedTuple):
    """What stands before and after the numbers."""

    head: bytes
    tail: bytes


def frame(kind: str, shape: tuple[int, ...]) -> Frame:
    """The archive of a contiguous tensor, but for its numbers."""
    numbers = _Record("data/0", size=math.prod(shape) * BYTES[kind])
    before = (_Record("data.pkl", _pickled(kind, shape)), _Record("byteorder", b"little"))
    version = _Record("version", b"3\n")
    head, places = b"", []
    for record in (*before, numbers):
        places.append(len(head))
        head += record.local()
    places.append(len(head) + numbers.size)
    records = (*before, numbers, version)
    listed = b"".join(record.listed(place) for record, place in zip(records, places, strict=True))
    start = places[-1] + len(version.local())
    count = len(records)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(listed), start, 0)
    return Frame(head, version.local() + listed + end)


class _Record:
    """One of an archive; without content it is the numbers, for which torch's readers look at no
    checksum and conversions write none."""

    def __init__(self, name: str, content: bytes = b"", size: int = 0) -> None:
        self._name, self._content = f"archive/{name}".encode(), content
        self.size = size or len(content)

    def local(self) -> bytes:
        """What stands before the content, and the content."""
        words = (0, _UTF8, 0, 0, 0, *self._sizes(), len(self._name), 0)
        return struct.pack("<4s5H3I2H", b"PK\3\4", *words) + self._name + self._content

    def listed(self, place: int) -> bytes:
        """Its entry in the table at the end."""
        words = (0, 0, _UTF8, 0, 0, 0, *self._sizes(), len(self._name), 0, 0, 0, 0, 0, place)
        return struct.pack("<4s6H3I5H2I", b"PK\1\2", *words) + self._name

    def _sizes(self) -> tuple[int, int, int]:
        return zlib.crc32(self._content), self.size, self.size


def _pickled(kind: str, shape: tuple[int, ...]) -> bytes:
    """_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict()), as torch spells it."""
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    storage = b"(%sctorch\n%sStorage\n%s%s%stQ" % (
        _value("storage"),
        STORAGES[kind].encode(),
        _value("0"),
        _value("cpu"),
        _value(math.prod(shape)),
    )
    hooks = b"ccollections\nOrderedDict\n)R"
    words = (storage, _value(0), _value(shape), _value(strides), b"\x89", hooks)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + b"".join(words) + b"tR."


def _value(value: object) -> bytes:
    """The opcodes of a plain value, without the frame of a whole pickle."""
    return pickle.dumps(value, 2)[2:-1]
