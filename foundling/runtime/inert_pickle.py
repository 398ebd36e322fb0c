"""A pickle of DCP's, read into inert records.

`.metadata` is a pickle, and unpickling runs whatever is hidden in it. This unpickler knows a short
list of names and builds a record of each, never torch's own classes (a pickle can change even an
allowed class). What the records say is for others to believe. It needs no torch: whoever reads says
what torch's types of numbers are to be.
"""

import io
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

_DCP = "torch.distributed.checkpoint"


class Record:
    """Stands for any class of the pickle; keeps what it was given and does nothing."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _names(dtypes: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """What a pickle may name, each mapped to a record class of its own, made anew for each file."""
    allowed: dict[tuple[str, str], Any] = {
        (module, name): type(name, (Record,), {})
        for module, name in [
            (f"{_DCP}.metadata", "Metadata"),
            (f"{_DCP}.metadata", "TensorStorageMetadata"),
            (f"{_DCP}.metadata", "BytesStorageMetadata"),
            (f"{_DCP}.metadata", "TensorProperties"),
            (f"{_DCP}.metadata", "ChunkStorageMetadata"),
            (f"{_DCP}.metadata", "MetadataIndex"),
            (f"{_DCP}.metadata", "StorageMeta"),
            (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
            (f"{_DCP}.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            # Some releases of Python 3.11 pickle an enum's member as getattr(class, name).
            ("builtins", "getattr"),
            # Other writers note where they wrote, as a path; it stays a record like the rest.
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        ]
    }
    allowed["torch", "Size"] = tuple
    return allowed | {("torch", name): value for name, value in dtypes.items()}


_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET),
    *(pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT),
    *(pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM),
    *(pickle.SETITEMS, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)


class InertUnpickler(pickle._Unpickler):
    """Python's own unpickler in Python: it knows only the operations that an index needs, and does
    not reserve gigabytes because a number in the file says so, as the one in C does."""

    dispatch: ClassVar = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def __init__(self, content: bytes, dtypes: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = _names(dtypes)

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None
