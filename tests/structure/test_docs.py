"""Every file that README, CONTRIBUTING.md and the guides of docs/ name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"docs/tour.md": 60, "docs/glossary.md": 50, "CONTRIBUTING.md": 20}
"""Pages, and how many files each names at least: a pattern that finds none proves nothing."""
GUIDES = sorted(
    f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"
)
"""All but the log, which tells of files as they were."""
QUESTIONS = (
    "learning-rate schedule", "a batch is put together", "a checkpoint is written",
    "NaN is handled",
    "attention kernels are chosen", "the chat template is rendered", "SLURM scripts are made",
    "a verb's options are", "a setting is validated", "what is in a run directory",
)  # fmt: skip
NOT_HERE = {
    *("FILE.py", "books.txt", "merges.txt", "modeling_foundling.py"),
    *("text.py", "parquet.py", "files.py", "base.py", "registry.py"),
}
"""A user's own or of a model's folder, and files named beside their folder."""


def files_named(text: str) -> set[str]:
    """Paths in backquotes or links that end as files and folders of the repository do."""
    quoted = re.findall(r"`([\w./-]+(?:\.py|\.md|\.toml|\.txt)|[\w-]+(?:/[\w-]+)*/)`", text)
    linked = re.findall(r"\]\(([\w./-]+)\)", text)
    return {*quoted, *linked} - NOT_HERE


def missing(page: str, text: str) -> list[str]:
    """Named files that are nowhere a reader would look: the package, the root, beside the page."""
    places = (ROOT / "foundling", ROOT, (ROOT / page).parent)
    of_a_run = {"checkpoints/", "tokenizer/", "logs/", "tb/"}
    return sorted(
        name
        for name in files_named(text) - of_a_run
        if not any((place / name).exists() for place in places)
    )


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *GUIDES])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    assert len(files_named(text)) >= PAGES.get(page, 0)
    assert missing(page, text) == []


def test_a_file_that_is_gone_is_seen() -> None:
    assert missing("docs/tour.md", "see `train/stages.py` and [this](nowhere.md)") == [
        "nowhere.md",
        "train/stages.py",
    ]


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_tour_answers_where_things_are(question: str) -> None:
    [row] = [line for line in (ROOT / "docs/tour.md").read_text().splitlines() if question in line]
    assert files_named(row)
