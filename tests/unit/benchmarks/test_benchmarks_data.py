"""`benchmarks.data`: everybody is measured alike, and who is absent or fails is said."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import child, contender, data, ours
from benchmarks.contender import Job
from benchmarks.corpus import Corpus, make_corpus
from benchmarks.data import Shape, bars, bench_data, chosen, describe_bench
from benchmarks.tokens import Encoder, rows_of, texts
from foundling.config.errors import DataError
from foundling.tokenizer.tokenizer import Tokenizer
from tests.village import Village

QUICK = Shape(workers=1, seq_len=64, rows=2, rounds=1, seconds=0.02, times=3)


@pytest.fixture(scope="module")
def corpus(village: Village, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("bench")
    return make_corpus("hamlet", 60_000, village.tokenizer, folder)


def test_the_corpus_is_the_sources_text_in_several_files(corpus: Corpus, tmp_path: Path) -> None:
    read = [text for file in corpus.files for batch in texts(file) for text in batch]
    assert len(corpus.files) > 1
    assert corpus.text_bytes == sum(len(text.encode()) for text in read)
    assert 60_000 <= corpus.text_bytes < 70_000
    assert Tokenizer.load(corpus.tokenizer).vocab_size == 400
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(DataError, match="no text"):
        make_corpus(str(tmp_path / "a.txt"), 1000, None, tmp_path / "work")


def test_everybody_stores_the_same_tokens(corpus: Corpus) -> None:
    encoder, tokenizer = Encoder(corpus.tokenizer), Tokenizer.load(corpus.tokenizer)
    batch = next(iter(texts(corpus.files[0])))[:20]
    assert encoder.documents(batch) == [tokenizer.document(text) for text in batch]
    flat = encoder.flat(batch)
    assert flat.tolist() == [id for text in batch for id in tokenizer.document(text)]
    assert rows_of(flat, 16).ravel().tolist() == flat[: len(flat) // 16 * 16].tolist()


def test_a_contender_goes_through_every_task(corpus: Corpus, tmp_path: Path) -> None:
    """In this process, which a bench never does, so that every line is seen."""
    job = Job(
        files=corpus.files,
        tokenizer=corpus.tokenizer,
        work=str(tmp_path),
        workers=1,
        seq_len=64,
        rows=2,
    )
    long = Job.from_json(json.loads(json.dumps({**job.to_json(), "work": str(tmp_path / "long")})))
    long.folder.mkdir()
    who: Any = ours
    assert child.prepare(who, job)["seconds"] > 0
    for settings in ours.SETTINGS:
        assert child.load(who, job, settings, 0.02)["tokens_per_second"] > 0
    told = child.save_middle(who, job, long, {"depth": 0}, 3)
    once = ours.open(job, {"depth": 0}).batches
    assert 3 * once <= told["batches"] <= 3 * once + 3
    found = child.resume(who, long, {"depth": 0})
    assert found["same"] is True
    middle = long.folder / "middle.pickle"
    _, expected = pickle.loads(middle.read_bytes())
    middle.write_bytes(pickle.dumps((json.dumps(3), expected)))
    assert child.resume(who, long, {"depth": 0})["same"] is False


def test_a_run_says_who_is_absent_and_who_failed(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "modules"
    home.mkdir()
    stub = "NEEDS = {needs}\nBUILDS = True\nSETTINGS = ({{}},)\n"
    (home / "gone_one.py").write_text(stub.format(needs="('no_such_package.x',)"))
    (home / "bad_one.py").write_text(
        stub.format(needs="()") + "def prepare(job): raise RuntimeError('cannot')\n"
    )
    monkeypatch.syspath_prepend(str(home))
    few = {"foundling": "benchmarks.ours", "gone": "gone_one", "bad": "bad_one"}
    monkeypatch.setattr(data, "CONTENDERS", few)
    monkeypatch.setattr(contender, "CONTENDERS", few)
    said: list[str] = []
    real = _in_process(monkeypatch)
    result = bench_data(corpus, tmp_path / "work", QUICK, say=said.append)
    assert real == ["foundling"] + ["bad"] + ["foundling"] * 4
    table = result["contenders"]
    assert table["gone"] == {"absent": "no_such_package.x is not installed"}
    assert table["bad"]["failed"] == "prepare: RuntimeError: cannot"
    assert table["foundling"]["resume_exact"] is True
    assert table["foundling"]["build_mb_per_second"] > 0
    assert result["bars"] == {}
    lines = describe_bench({**result, "load_average_per_core": 2.0})
    assert any("was busy" in line for line in lines)
    lines = describe_bench({**result, "load_average_per_core": 0.1})
    assert not any("was busy" in line for line in lines)
    assert any("not installed" in line for line in lines)
    assert any(line.startswith("foundling ") and " yes " in line for line in lines)
    assert any("back at the middle" in line for line in said)
    json.dumps(result)


def _in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the children's work here: a new process each would take seconds to import torch."""
    asked: list[str] = []

    class Done:
        def __init__(self, out: str, error: str) -> None:
            self.returncode, self.stdout, self.stderr = bool(error), out, error

    def run(command: list[str], *, input: str, **options: object) -> Done:
        assert command[0] == sys.executable
        assert command[-1] == "benchmarks.child"
        asked.append(json.loads(input)["contender"])
        try:
            return Done("chatter\n" + json.dumps(child.work(json.loads(input))) + "\n", "")
        except Exception as error:
            return Done("", f"Traceback\n{type(error).__name__}: {error}\n")

    monkeypatch.setattr(data.subprocess, "run", run)
    return asked


def test_bars_compare_with_the_best_of_the_others() -> None:
    def row(build: float | None, load: float, resume: float) -> dict[str, Any]:
        found = {"load_tokens_per_second": load, "resume_seconds": resume}
        return found if build is None else {**found, "build_mb_per_second": build}

    table = {"foundling": row(3.0, 95.0, 0.01), "a": row(2.0, 100.0, 0.02), "b": row(None, 50, 1)}
    found = bars({**table, "c": {"absent": "x"}, "d": {"failed": "y"}})
    same = {"the_best": "a", "met": True, "by_cpu": None}
    assert found["build"] == {"times_the_best": 1.5, **same}
    assert found["load"] == {"times_the_best": 0.95, **same}
    assert found["resume"] == {"times_the_best": 2.0, **same}
    for name, seconds in (("foundling", 2.0), ("b", 3.0)):
        table[name]["resume_cpu_seconds"] = seconds
    assert bars(table)["resume"]["by_cpu"] == 1.5
    table["a"] = row(4.0, 110.0, 0.005)
    assert [bar["met"] for bar in bars(table).values()] == [False, False, False]


def test_only_narrows_the_others() -> None:
    assert chosen(["grain"]) == ["foundling", "grain"]
    assert chosen([])[0] == "foundling"
