"""Workers, interruptions and the order of work leave no trace in the bytes."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from build_samples import Numbers, documents, files, learn, make, rows, text

from foundling.config.errors import DataError
from foundling.data.build import encode
from foundling.data.build.build import WORK_FOLDER
from foundling.data.build.part_files import read_part
from foundling.data.dataset import DataSet
from foundling.data.readers.source import Row, is_held_out
from foundling.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts a piece (workers hear of it by the job), and workers for small budgets too."""
    monkeypatch.setattr(encode, "PART_ROWS", 30)
    monkeypatch.setattr(sys.modules["foundling.data.build.build"], "SMALL_TOKENS", 0)


def kept(source: Numbers) -> list[str]:
    """What a build must hold, by brute force: usable, and once each."""
    arrived = [row for piece in source.pieces() for row in piece.rows(Counter())]
    return list(dict.fromkeys(f"<|bos|>{row.text}<|eos|>" for row in arrived if row.text))


def test_workers_change_no_byte_and_drop_the_later_copies(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = Numbers()
    manifest = make(source, tokenizer, tmp_path / "one")
    assert make(source, tokenizer, tmp_path / "many", workers=3) == manifest
    assert files(tmp_path / "one") == files(tmp_path / "many")
    stored = [
        text
        for split in ("train", "val")
        for text in documents(DataSet(tmp_path / "many", split=split), tokenizer)
    ]
    assert sorted(stored) == sorted(kept(source))
    result = manifest.recipe["result"]
    assert result["filtered"] == 12
    assert result["rows"] == 600 - 12
    lines = (tmp_path / "one/quarantine.jsonl").read_text().splitlines()
    bad = [json.loads(line) for line in lines]
    assert [entry["where"] for entry in bad] == [
        f"n:{n}" for n in range(600) if n % 40 == 39 and n % 50 != 49
    ]
    arrived = [n for n in range(600) if n % 50 != 49]
    assert [arrived[entry["row"]] for entry in bad] == [int(e["where"][2:]) for e in bad]
    usable = sum(1 for n in arrived if n % 40 != 39)
    assert result["duplicates"] == usable - len(stored) > 20


def test_idle_workers_help_with_one_long_piece(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make(Numbers(piece=600), tokenizer, tmp_path / "one")
    make(Numbers(piece=600), tokenizer, tmp_path / "many", workers=3)
    assert files(tmp_path / "one") == files(tmp_path / "many")


def test_the_ends_of_parts_leave_no_trace(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(Numbers(), tokenizer, tmp_path / "small")
    monkeypatch.setattr(encode, "PART_ROWS", 10_000)
    make(Numbers(piece=37), tokenizer, tmp_path / "large")
    assert files(tmp_path / "small") == files(tmp_path / "large")


def test_a_budget_is_reached_after_duplicates_are_gone(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    endless = Numbers(count=None)
    one = make(endless, tokenizer, tmp_path / "one", max_tokens=12_000)
    many = make(endless, tokenizer, tmp_path / "many", max_tokens=12_000, workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "many")
    assert one == many
    longest = max(len(tokenizer.document(text(n))) for n in range(900))
    assert 12_000 <= one.train_tokens < 12_000 + longest
    assert one.recipe["result"]["duplicates"] > 20
    wanted: dict[bool, list[str]] = {False: [], True: []}
    left = 12_000
    for document in kept(Numbers(count=5000)):
        held_out = is_held_out(Row(text=document[7:-7]), 0.1)
        wanted[held_out].append(document)
        left -= 0 if held_out else len(tokenizer.document(document[7:-7]))
        if left <= 0:
            break
    for split, documents_ in (("train", wanted[False]), ("val", wanted[True])):
        stored = documents(DataSet(tmp_path / "one", split=split), tokenizer)
        assert sorted(stored) == sorted(documents_)


def test_several_sources_take_turns_so_that_a_budget_reaches_all(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    both = (Numbers(piece=600), Numbers(first=10_000, count=90, name="others"))
    one = make(both, tokenizer, tmp_path / "one", max_tokens=3000)
    make(both, tokenizer, tmp_path / "many", max_tokens=3000, workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "many")
    assert one.name == "numbers+others"
    numbers = [int(t[:-7].split()[-1]) for t in documents(DataSet(tmp_path / "one"), tokenizer)]
    assert min(sum(n >= 5000 for n in numbers), sum(n < 5000 for n in numbers)) > 20


def test_duplicates_stay_if_asked_for_or_drawn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    twice = [*rows(60), *rows(60)]
    dropped = make(twice, tokenizer, tmp_path / "dropped")
    assert dropped.recipe["result"]["duplicates"] == 60
    asked = make(twice, tokenizer, tmp_path / "asked", keep_duplicates=True)
    drawn = make(Numbers(draws=True), tokenizer, tmp_path / "drawn")
    for manifest, count in ((asked, 120), (drawn, 600 - 12 - 12)):
        assert manifest.recipe["result"]["duplicates"] == 0
        assert sum(info.documents for info in (*manifest.train, *manifest.val)) == count
    with pytest.raises(DataError, match="already holds"):
        make(twice, tokenizer, tmp_path / "asked")


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("refuse", DataError, "the numbers have run out; get some more"),
        ("fail", RuntimeError, "a bug of ours"),
        ("die", DataError, "exit code -9"),
    ],
)
def test_trouble_in_a_worker_stops_the_build_which_goes_on_later(
    what: str, error: type[Exception], said: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        make(Numbers(piece=600, trouble=(350, what)), tokenizer, tmp_path / "d", workers=2)
    parts = sorted((tmp_path / "d" / WORK_FOLDER / "parts").rglob("*.arrow"))
    assert parts
    oldest = parts[0].stat().st_mtime_ns
    with pytest.raises(DataError, match="run out"):  # what is there is not made again
        make(Numbers(piece=600, trouble=(350, "refuse")), tokenizer, tmp_path / "d", workers=2)
    assert parts[0].stat().st_mtime_ns == oldest
    make(Numbers(piece=600), tokenizer, tmp_path / "d", workers=2)
    make(Numbers(), tokenizer, tmp_path / "whole")
    assert files(tmp_path / "d") == files(tmp_path / "whole")


@pytest.mark.parametrize("how", ["torn", "holed", "other tokens"])
def test_a_damaged_part_is_made_again(how: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Parts are not forced to the disk: a power cut may leave half of one, or zeros in it."""
    with pytest.raises(DataError):
        make(Numbers(trouble=(350, "refuse")), tokenizer, tmp_path / "d")
    part = sorted((tmp_path / "d" / WORK_FOLDER / "parts").rglob("*.arrow"))[2]
    content = part.read_bytes()
    tokens = read_part(part).documents.tokens.tobytes()
    at = content.index(tokens)
    damaged = {
        "torn": content[:-200],
        "holed": content[:at] + bytes(len(tokens)) + content[at + len(tokens) :],
        "other tokens": content[:at] + tokens[2:] + tokens[:2] + content[at + len(tokens) :],
    }
    assert len(tokens) > 200
    part.write_bytes(damaged[how])
    make(Numbers(), tokenizer, tmp_path / "d")
    make(Numbers(), tokenizer, tmp_path / "whole")
    assert files(tmp_path / "d") == files(tmp_path / "whole")


def test_too_many_bad_rows_stop_a_build_until_it_is_allowed(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def source(bad_from: int) -> list[Row]:
        good = rows(3000)
        return [Row(text="", where=f"w{n}") if n >= bad_from else r for n, r in enumerate(good)]

    with pytest.raises(DataError, match=r"rows cannot be used .*'empty' at w\d+; .*--max-bad"):
        make(source(1000), tokenizer, tmp_path / "d")
    # Long before the end: the last rows were never encoded.
    encoded = len(list((tmp_path / "d" / WORK_FOLDER / "parts").rglob("*.arrow")))
    assert 1000 / 30 < encoded < 1200 / 30
    manifest = make(source(1000), tokenizer, tmp_path / "d", max_bad=0.7)
    assert manifest.recipe["result"]["quarantined"] == 2000
    with pytest.raises(DataError, match="3 of 20 rows"):  # few rows are judged at the end
        make(source(17)[:20], tokenizer, tmp_path / "few")


def test_text_and_conversations_do_not_mix(tokenizer: Tokenizer, tmp_path: Path) -> None:
    both = (Numbers(), Numbers(kind="chat", name="talk"))
    with pytest.raises(DataError, match="numbers holds text and talk conversations"):
        make(both, tokenizer, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_workers_die_with_a_killed_parent(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from build_samples import Numbers, make
        from foundling.tokenizer.tokenizer import Tokenizer
        tokenizer = Tokenizer.load(sys.argv[2])
        make(Numbers(count=None), tokenizer, Path(sys.argv[3]), workers=3, max_tokens=10**12)
    """
    words = [str(Path(__file__).parent), str(tmp_path / "tokenizer"), str(tmp_path / "d")]
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *words])
    parts = tmp_path / "d" / WORK_FOLDER / "parts"
    deadline = time.monotonic() + 60
    while len(list(parts.rglob("*.arrow"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    children = [int(pid) for pid in _children(parent.pid)]
    assert len(children) >= 2  # two worker processes, and what Python keeps beside them
    parent.kill()
    parent.wait()
    while any(map(_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_alive, children))


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" and os.getpid() != pid
