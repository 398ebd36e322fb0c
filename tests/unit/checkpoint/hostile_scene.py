"""The scene of an attack by files, and the traps that say whether it worked: a folder that the
hostile code would make, and a neighbouring folder that nobody may open or change."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from foundling.config.errors import UserError


class Runs:
    """Makes the trap's folder if anybody unpickles it."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trap),)


@dataclass
class Scene:
    """Where an attack takes place."""

    root: Path
    folder: Path
    """Two whole checkpoints of a run, steps 9 and 10."""
    opened: list[str] = field(default_factory=list)

    @property
    def trap(self) -> Path:
        return self.root / "trap"

    @property
    def secret(self) -> Path:
        return self.root / "neighbour" / "secret"

    @property
    def newest(self) -> Path:
        return self.folder / "step-00000010"


watching: list[Scene] = []


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    """Notes what is opened in the neighbour's folder, and every program that is started."""
    for scene in watching or ():  # None when python ends
        if event == "open" and "neighbour" in str(arguments[0]):
            scene.opened.append(str(arguments[0]))
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
            scene.opened.append(event)


sys.addaudithook(_listen)


def refused(attempt: Callable[[], object], words: str = "") -> None:
    """One sentence, and it says why."""
    with pytest.raises(UserError) as caught:
        attempt()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
