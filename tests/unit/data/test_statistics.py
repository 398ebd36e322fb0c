"""`data inspect --stats`: counts against slow ones; memory does not grow with the shards."""

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from unique_data import write_data

from foundling.cli.main import run_verb
from foundling.config.data import packing_spec_of
from foundling.config.errors import DataError
from foundling.data.build.build import build
from foundling.data.dataset import DataSet
from foundling.data.open_source import open_source
from foundling.data.readers.source import Row
from foundling.data.statistics import REASONS, bin_of, describe_stats, quarantine_reasons, stats
from foundling.tokenizer.tokenizer import Tokenizer
from tests.village import Village

Make = Callable[..., DataSet]
LENGTHS = [[2, 3, 4, 100, 129, 128], [5, 64, 65, 1000]]


def test_counts_are_those_of_a_slow_count(make_data: Make) -> None:
    data = make_data(LENGTHS, val=[[7, 9]])
    found = stats(data.folder, seq_len=64)
    flat = [length for shard in LENGTHS for length in shard]
    train = found["train"]
    assert train["documents"] == len(flat)
    assert train["tokens"] == sum(flat)
    assert train["shards"] == 2
    assert train["text_bytes"] == 3 * sum(flat)
    assert train["bytes_per_token"] == 3 * sum(flat) / (sum(flat) - 2 * len(flat))
    assert found["val_share"] == 2 / 12
    lengths = train["lengths"]
    assert (lengths["shortest"], lengths["longest"]) == (2, 1000)
    assert lengths["mean"] == sum(flat) / len(flat)
    slow: Counter[int] = Counter(1 << (length - 1).bit_length() for length in flat)
    told = {part["up_to"]: part["documents"] for part in lengths["histogram"]}
    assert told == slow
    assert sum(part["tokens"] for part in lengths["histogram"]) == sum(flat)
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        exact = sorted(flat)[int(np.ceil(share * len(flat))) - 1]
        assert exact <= lengths["quantiles"][name] <= exact * 1.1
    kinds = {kind: part["documents"] for kind, part in train["kinds"].items()}
    assert kinds == {"letter": 3 + 2, "story": 3 + 2}
    assert sum(part["tokens"] for part in train["kinds"].values()) == sum(flat)


def test_packings_cost_what_the_loader_would_deliver(make_data: Make) -> None:
    data = make_data(LENGTHS)
    found = stats(data.folder, seq_len=64)["packings"]
    assert set(found) == {"concat", "bestfit", "bucket", "pad"}
    for name, cost in found.items():
        size = data.size(packing_spec_of(64, name))
        assert cost["units"] == size.units
        assert cost["padded_share"] == pytest.approx(1 - size.tokens / size.positions)
    # Rows of 64 end inside documents 3, 4, 5 of the first shard and 2, 3, 4 of the second.
    assert found["concat"]["cut_share"] == 6 / 10
    assert found["bestfit"]["cut_share"] == 5 / 10
    assert stats(data.folder)["packings"] == {}


def test_no_plan_is_left_behind(tmp_path: Path) -> None:
    data = write_data(tmp_path / "set", LENGTHS)
    before = sorted(data.folder.rglob("*"))
    stats(data.folder, seq_len=64)
    assert sorted(data.folder.rglob("*")) == before


def test_a_bin_ends_at_every_power_of_two() -> None:
    lengths = np.arange(1, 5000)
    bins = bin_of(lengths)
    assert (np.diff(bins) >= 0).all()
    for power in range(13):
        assert bins[2**power - 1] == 8 * power
    assert (lengths <= 2 ** (bins / 8) * (1 + 1e-9)).all()


def test_a_chats_bytes_are_divided_by_what_the_loss_counts(village: Village) -> None:
    train = stats(village.chat)["train"]
    assert train["bytes_per_token"] == train["text_bytes"] / train["targets"]
    assert 0.5 < train["bytes_per_token"] < 10


def test_quarantine_duplicates_and_the_rest_are_told(
    tmp_path: Path, village: Village, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row(text=text, split="train") for text in ("a", "b", "", "\x00", "a", "  ")]
    tokenizer = Tokenizer.load(village.tokenizer)
    build(rows, tokenizer, tmp_path / "set", name="t", kind="text", max_bad=1.0)
    found = stats(tmp_path / "set")
    assert found["quarantine"] == {"empty": 2, "NUL": 1}
    assert found["build"]["duplicates"] == 1
    run_verb(["data", "inspect", "--stats", str(tmp_path / "set")])
    said = capsys.readouterr().out
    assert "in quarantine          2  empty" in said
    assert "duplicates 1" in said
    assert "val: nothing" in said
    run_verb(["data", "inspect", "--stats", str(tmp_path / "set"), "--json"])
    assert json.loads(capsys.readouterr().out)["train"]["documents"] == 2


def test_reasons_without_end_are_counted_together(tmp_path: Path) -> None:
    lines = [json.dumps({"reason": f"odd {n}"}) for n in range(2 * REASONS)]
    (tmp_path / "quarantine.jsonl").write_text("\n".join(lines))
    reasons = quarantine_reasons(tmp_path)
    assert len(reasons) == REASONS + 1
    assert reasons["other reasons"] == REASONS
    (tmp_path / "quarantine.jsonl").write_text('{"reason": "x"}\n{"rea')
    with pytest.raises(DataError, match="cannot be read"):
        quarantine_reasons(tmp_path)


def test_a_damaged_shard_is_refused(make_data: Make) -> None:
    data = make_data([[4, 5]])
    file = data.folder / "train" / "shard-00000.arrow"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match="bytes where the manifest says"):
        stats(data.folder)


def test_memory_does_not_grow_with_the_shards(tmp_path: Path) -> None:
    peaks = []
    for shards in (4, 64):
        data = write_data(tmp_path / str(shards), [[30] * 20_000] * shards)
        tracemalloc.start()
        stats(data.folder, seq_len=512, workers=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1_000_000, peaks


def test_the_description_has_a_line_for_every_part(village: Village) -> None:
    lines = describe_stats(stats(village.text, seq_len=64))
    assert sum(line.startswith("  bestfit") for line in lines) == 1
    assert any("bytes a token" in line for line in lines)
    assert any(line.startswith("held out: ") for line in lines)


def test_several_sources_are_told_apart(tmp_path: Path, village: Village) -> None:
    for name, count in (("one", 30), ("two", 10)):
        lines = [json.dumps({"text": f"{name} {n}"}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, lines[0]]))
    sources = [open_source(str(tmp_path / f"{name}.jsonl")) for name in ("one", "two")]
    build(sources, Tokenizer.load(village.tokenizer), tmp_path / "set", val_share=0.2)
    found = stats(tmp_path / "set")
    one, two = found["sources"]
    assert (one["source"], two["source"]) == ("one.jsonl", "two.jsonl")
    assert one["documents"] + two["documents"] == found["train"]["documents"]
    assert one["tokens"] + two["tokens"] == found["train"]["tokens"]
    assert one["share"] + two["share"] == pytest.approx(1)
    assert 15 < one["documents"] <= 30
    assert found["build"]["duplicates"] == 2
    assert any(line.startswith("  from one.jsonl") for line in describe_stats(found))
