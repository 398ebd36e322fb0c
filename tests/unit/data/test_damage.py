"""Damaged files end in quarantine or in one sentence: never a traceback, a crash or silence.

A sample of the 500; `make test-full ONLY=damage` takes all of them.
"""

import io
import random
import zlib
from collections import Counter
from pathlib import Path

import damage_child
import pytest
from damage import ALL, Case, cases, failures, judged

from foundling.config.data_manifest import Manifest
from foundling.data import shard
from foundling.data.readers import file_formats

SAMPLE = 110
NOTICED = ("refused", "quarantined")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    damage_child.make_home(folder)
    return folder


def test_there_are_500_cases_and_no_two_are_the_same() -> None:
    assert len(cases()) == len(set(cases())) == ALL
    content = b"some content that is long enough to be hurt in many ways, twice over" * 20
    hurt = {(case.damage, case.hurt(content)) for case in cases() if case.damage != "renamed"}
    assert len(hurt) > 300


def test_a_sample_of_damaged_files(home: Path) -> None:
    chosen = random.Random(4).sample(cases(), SAMPLE)
    outcomes = judged(home, [case.name for case in chosen])
    assert not failures(outcomes)
    assert len(outcomes) == SAMPLE
    counts = Counter(outcomes.values())
    assert counts["refused"] > SAMPLE / 3
    assert counts["quarantined"] > SAMPLE / 10
    assert counts["made again"] > 0  # a damaged plan is computed anew
    # What nobody can see in the file itself stays rare, and verify tells it by its checksum.
    assert counts["only its checksum tells"] < SAMPLE / 6


def test_the_judge_notices_a_file_that_ends_the_process(home: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os, signal, sys\n"
        "for name in json.load(sys.stdin):\n"
        "    print(json.dumps({'begin': name}), flush=True)\n"
        "    if name == 'deadly': os.kill(os.getpid(), signal.SIGBUS)\n"
        "    print(json.dumps({'end': name, 'outcome': 'refused'}), flush=True)\n"
    )
    outcomes = judged(home, ["one", "deadly", "two"], child)
    assert list(failures(outcomes)) == ["deadly"]
    assert outcomes["one"] == outcomes["two"] == "refused"


def test_the_judge_notices_silence_and_tracebacks(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take a defence away, and the cases that it is for fail."""
    # A token becomes another one of the vocabulary: nothing but the checksum can tell.
    flipped = Case("train/shard-00000.arrow", "flip", 2)
    assert damage_child.judge_built(flipped, home, _fresh(tmp_path, 1)) == "refused"
    with monkeypatch.context() as patch:
        patch.setattr(shard, "sha256_file", lambda path: hashes_of(home, path))
        with pytest.raises(AssertionError, match="other rows than before"):
            damage_child.judge_built(flipped, home, _fresh(tmp_path, 2))
    cut = Case("pages.jsonl.gz", "half", 0)
    assert damage_child.judge_source(cut, home, _fresh(tmp_path, 3)) in NOTICED
    with monkeypatch.context() as patch:
        patch.setattr(file_formats.gzip, "GzipFile", _Lenient)
        with pytest.raises(AssertionError, match="in silence"):
            damage_child.judge_source(cut, home, _fresh(tmp_path, 4))


def _fresh(folder: Path, number: int) -> Path:
    (folder / str(number)).mkdir()
    return folder / str(number)


def hashes_of(home: Path, path: Path) -> str:
    """A checksum that looks at nothing: what the manifest says."""
    manifest = Manifest.load(home / "text")
    return next(
        info.sha256 for info in (*manifest.train, *manifest.val) if str(path).endswith(info.name)
    )


class _Lenient:
    """Unpacks as much as it can and says nothing, as a careless reader would."""

    def __new__(cls, fileobj: object) -> object:
        content = fileobj.read()  # type: ignore[attr-defined]
        whole = zlib.decompressobj(wbits=31).decompress(content)
        return io.BytesIO(whole[: whole.rfind(b"\n") + 1])
