"""README.md of an exported model."""

from pathlib import Path

from foundling.checkpoint.convert.source import Source


def write_card(folder: Path, source: Source, family: str) -> None:
    (folder / "README.md").write_text("x")
