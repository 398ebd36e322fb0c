"""`report --csv` and `--parquet`: the steps of runs as a table."""

import csv
import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError
from foundling.report import runs as tables
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import read_run
from tests.full.run_reader import write_run
from tests.unit.report.run_fakes import make_run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunDir, RunDir]:
    return write_run(tmp_path / "one", 25), make_run(tmp_path / "two", steps=5)


def test_each_step_is_a_row_and_each_number_a_column(
    runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    run_verb(["report", str(runs[0].path), str(runs[1].path), "--csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["run"], int(row["step"])) for row in rows] == [
        *(("one", step) for step in range(1, 26)),
        *(("two", step) for step in range(1, 6)),
    ]
    losses = read_run(runs[0]).metrics["loss"]
    assert [float(row["loss"]) for row in rows[:25]] == losses.tolist()
    assert [row["sources.data/web.units"] for row in rows[24:26]] == ["256", ""]
    assert [bool(row["update_ratio"]) for row in rows[:10]] == [False] * 9 + [True]


def test_parquet_holds_the_same(
    runs: tuple[RunDir, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 7)
    file = tmp_path / "steps.parquet"
    run_verb(["report", str(runs[0].path), str(runs[1].path), "--parquet", "-o", str(file)])
    table = pq.read_table(file).to_pylist()
    out = io.StringIO()
    tables.print_csv(runs, out)
    told = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert len(table) == len(told) == 30
    for row, words in zip(table, told, strict=True):
        assert row.keys() == words.keys()
        assert row["run"] == words["run"]
        numbers = {
            name: float(word) if word else None for name, word in words.items() if name != "run"
        }
        assert {name: value for name, value in row.items() if name != "run"} == numbers
    with pytest.raises(ConfigError, match="exists"):
        run_verb(["report", str(runs[0].path), "--parquet", "-o", str(file)])


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--parquet"], "give -o FILE too"), (["--csv", "--bins", "1k"], "--bins has no effect")],
)
def test_what_has_no_effect_is_refused(
    words: list[str], told: str, runs: tuple[RunDir, RunDir]
) -> None:
    with pytest.raises(ConfigError, match=told):
        run_verb(["report", str(runs[0].path), *words])
