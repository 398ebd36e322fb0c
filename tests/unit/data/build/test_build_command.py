"""`foundling data build` as it is typed, and what it says on the way."""

import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from build_samples import documents, learn, text

from foundling.cli import main
from foundling.cli.main import run_verb
from foundling.config.data_manifest import Manifest
from foundling.config.errors import ConfigError, DataError
from foundling.data.build.scheduler import EVERY_S, BuildProgress, Progress, duration
from foundling.data.dataset import DataSet
from foundling.runtime.exits import Exit
from foundling.tokenizer.tokenizer import Tokenizer
from tests.full.build_baseline import encoder_alone, whole_build


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, two files of rows and an evaluation set."""
    folder = tmp_path_factory.mktemp("command")
    learn().save(folder / "tokenizer")
    for name, first in (("one", 0), ("two", 100)):
        rows = [
            {"title": f"t{n}", "body": text(n), "score": n % 5} for n in range(first, first + 150)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "quiz.jsonl").write_text(json.dumps({"question": text(6), "answer": 3}) + "\n")
    return folder


def command(home: Path, *words: str) -> None:
    run_verb(["data", "build", *words, "--tokenizer", str(home / "tokenizer")])


def test_a_whole_command(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(text(6).split()) >= 13
    command(
        home,
        *[str(home / "one.jsonl"), str(home / "two.jsonl"), "-o", str(tmp_path / "d")],
        *["--text", "body", "--where", "score>=1", "--decontaminate", str(home / "quiz.jsonl")],
        *["--workers", "2", "--shard-tokens", "1500", "--val-share", "0.1"],
    )
    result = Manifest.load(tmp_path / "d").recipe["result"]
    assert [one["source"] for one in result.pop("sources")] == ["one.jsonl", "two.jsonl"]
    assert result == {
        "rows": 240,
        "quarantined": 0,
        "duplicates": 40,
        "overlapping": 1,
        "filtered": 60,
    }
    said = capsys.readouterr().out.splitlines()[-1]  # after progress, on a slow machine
    assert said.startswith(f"{tmp_path / 'd'}: ")
    for words in ("40 duplicates dropped", "1 left out for overlap", "60 filtered out"):
        assert words in said
    tokenizer = Tokenizer.load(home / "tokenizer")
    stored = [
        document
        for split in ("train", "val")
        for document in documents(DataSet(tmp_path / "d", split=split), tokenizer)
    ]
    wanted = {f"<|bos|>{text(n)}<|eos|>" for n in range(250) if n % 5 and n != 6}
    assert sorted(stored) == sorted(wanted)


def test_text_from_a_template(home: Path, tmp_path: Path) -> None:
    words = ["--template", "{title}: {body}", "--documents", "20", "--val-share", "0"]
    command(home, str(home / "one.jsonl"), "-o", str(tmp_path / "d"), *words)
    tokenizer = Tokenizer.load(home / "tokenizer")
    stored = documents(DataSet(tmp_path / "d"), tokenizer)
    assert sorted(stored) == sorted(f"<|bos|>t{n}: {text(n)}<|eos|>" for n in range(20))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one.jsonl", "-o", "x"], "no text"),
        (["one.jsonl", "--text", "body"], "-o FOLDER"),
        (["hamlet", "-o", "x"], "never ends by itself"),
        (["one.jsonl", "--text", "body", "-o", "x", "--max-bad", "7"], "no share"),
        (
            ["one.jsonl", "--text", "body", "-o", "x", "--workers", "2000"],
            "--workers 2000 is more than this machine can use; give at most",
        ),
        (
            ["one.jsonl", "--text", "body", "-o", "x", "--engine", "spark"],
            "--engine must be one of local, ray, slurm, not 'spark'",
        ),
        (["one.jsonl", "--text", "body", "-o", "x", "--decontaminate", "none"], "evaluation set"),
        (["one.jsonl", "--text", "body", "-o", "x", "--where", "??"], "not understood"),
        (["one.jsonl", "--text", "body", "-o", "x", "--where", "score>9"], "150 not"),
        (["one.jsonl", "--text", "body", "-o", "x", "--stream"], "--stream has no effect"),
        (["fineweb-ed", "-o", "x"], "did you mean fineweb-edu"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    words: list[str], said: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    before = sorted(home.iterdir())
    with pytest.raises((ConfigError, DataError), match=said):
        command(home, *words)
    assert sorted(home.iterdir()) == before


def test_too_little_text_is_told(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(home / "one.jsonl"), "--text", "body", "-o", str(tmp_path / "d")]
    command(home, *words, "--tokens", "1000000")
    found = DataSet(tmp_path / "d").manifest.train_tokens
    said = "".join(capsys.readouterr())
    assert f"has {found:,} tokens where --tokens asks for 1,000,000" in " ".join(said.split())


def test_a_tokenizer_must_be_named(home: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        run_verb(["data", "build", str(home / "one.jsonl"), "-o", str(home / "x")])


def progress(documents: int, tokens: int, share: float | None, bad: int = 0) -> Progress:
    return Progress(documents, tokens, documents, bad, 0, share)


def test_progress_says_rates_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    with BuildProgress(lambda: now) as meter:
        meter.show(progress(1000, 50_000, 0.25))  # from an earlier start: no speed of this one
        for step in range(1, 5):
            now += EVERY_S / 2
            meter.show(progress(1000 + 500 * step, 50_000 + 10_000 * step, 0.25 + step / 16))
        assert meter.line(progress(9, 9, None, bad=2), now).endswith("2 in quarantine")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "2,000 documents, 70,000 tokens, 100 documents/s, 2,000 tokens/s" in lines[0]
    assert lines[0].endswith("38%, 50 s left")
    assert lines[1].endswith("50%, 40 s left")
    assert [duration(s) for s in (89, 91, 7200)] == ["89 s", "2 min", "2.0 h"]


def test_a_build_is_measured_against_the_encoder_alone(home: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text(n)}) + "\n" for n in range(120))
    )
    specs, tokenizer = [str(tmp_path / "texts.jsonl")], Tokenizer.load(home / "tokenizer")
    alone = encoder_alone(specs, tokenizer, 2)
    built = whole_build(specs, tokenizer, tmp_path / "set", 1)
    assert alone.text_bytes == built.text_bytes == sum(len(text(n)) for n in range(120))
    assert alone.tokens == built.tokens - 2 * 120  # BOS and EOS
    assert 0 < alone.mib_per_s_with_start < alone.mib_per_s
    assert built.mib_per_s_with_start == built.mib_per_s


def test_a_full_disk_ends_a_build_with_74_and_one_sentence(home: Path, tmp_path: Path) -> None:
    """Real processes that may write no file, or none as large as a part; with room they go on."""
    words = ["data", "build", str(home / "one.jsonl"), "--text", "body"]
    words += ["--tokenizer", str(home / "tokenizer")]
    jobs = {}
    for size, workers in ((0, 1), (1 << 12, 1), (1 << 12, 2)):
        output = tmp_path / f"{size}-{workers}"
        jobs[output] = subprocess.Popen(
            [
                *(sys.executable, "-m", "foundling", *words),
                *("-o", str(output), "--workers", str(workers)),
            ],
            env={**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size)),
        )
    for output, job in jobs.items():
        told = job.communicate(timeout=100)[0]
        assert job.returncode == Exit.UNSAVED, told
        assert "Traceback" not in told
        assert f"foundling: {output}" in told
        assert "File too large; make room there" in told
        assert not (output / "manifest.json").exists()
    assert main._run_and_report_exit([*words, "-o", str(output)]) == (Exit.OK, "")
