"""Answers that take seconds to prove, kept on disk for the next process.

An answer is filed under everything it follows from: what was asked, the versions of both libraries
and the source text of the proof itself. The file says all of that again and carries a checksum; one
that is damaged, foreign or of another version is proved anew. Nothing depends on the folder being
writable.
"""

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from foundling.runtime.files import cache_folder, write_text_atomic

_LIBRARIES = ("tiktoken", "tokenizers")
_SOURCES = ("bytelevel.py", "codepoints.py", "cuts.py", "fast.py", "merges.py", "pattern.py")


def proved(topic: str, asked: str, prove: Callable[[], Any]) -> Any:
    """The JSON answer to a question: from disk, or proved and written there."""
    basis = {"topic": topic, "asked": asked, **versions()}
    key = _digest(basis)
    path = cache_folder("proofs") / f"{topic}-{key[:24]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(path.read_text(encoding="utf-8"))
        if note["basis"] == basis and note["sum"] == _digest([basis, note["answer"]]):
            return note["answer"]
    answer = prove()
    note = {"basis": basis, "answer": answer, "sum": _digest([basis, answer])}
    with suppress(OSError):
        write_text_atomic(path, json.dumps(note, indent=1) + "\n")
    return answer


@cache
def versions() -> dict[str, str]:
    """What a proof follows from besides its question."""
    sources = hashlib.sha256()
    for name in _SOURCES:
        sources.update(Path(__file__).with_name(name).read_bytes())
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {**libraries, "python": sys.version.split()[0], "proof": sources.hexdigest()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
