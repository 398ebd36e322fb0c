"""Options of `plan`: each has an effect, or is refused by its name."""

import shlex
from pathlib import Path
from typing import ClassVar

import pytest
from asking import said

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.plan.resolve import resolve_here


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--gpu h100", "--gpu"),
        ("--gpus 8", "--gpus"),
        ("--nodes 2", "--nodes"),
        ("--price 3", "--price"),
        ("--what-if train.seq-len=64", "--what-if"),
        ("-o run.yaml", "--output"),
    ],
)
def test_a_probe_refuses_what_it_would_ignore(option: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} has no effect with --probe"):
        run_verb(f"plan hamlet --probe {option}".split())


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("plan clm-60m --price 3", "--price has no effect without hardware"),
        ("plan clm-60m --probe-minutes 3", "--probe-minutes has no effect without --probe"),
        ("plan clm-60m --force", "--force has no effect"),
        ("plan clm-60m --gpu h100 --gpus 0", "--gpus 0 must be above zero"),
        ("plan clm-60m --gpu h100 --price abc", "--price abc is not a number"),
        ("plan clm-60m --gpu h100 --nodes 1,x", "--nodes x is not a whole number"),
        ("plan clm-60m --gpu h100 --nodes ,", "--nodes ',' names no number"),
        ("data build hamlet --workers 0", "--workers 0 must be above zero"),
        ("report runs/a --force", "--force has no effect"),
        ("data verify data/a --force", "--force has no effect"),
    ],
)
def test_a_mistake_names_its_flag(command: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_verb(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "train hamlet --run=",
        "train hamlet --run-dir=",
        "report runs/a --output=",
        "runs list ''",
        "data build '' -o data/a",
        "data build hamlet -o ''",
        "tokenizer train '' -o data/a",
        "convert runs/a '' --to hf",
        "train ''",
        "train hamlet --data.sources \"{'': 1}\"",
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"is empty; give it a value|source without a name"):
        run_verb(shlex.split(command))
    assert not list(tmp_path.iterdir())


def test_what_if_is_of_every_named_machine(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan clm-60m --gpu h100 --nodes 1,8 --what-if train.seq-len=4096"
    rows = said(capsys, command).split("what  ")[1].splitlines()[1:]
    assert [row.split("h100-sxm")[1].split()[0] for row in rows] == ["8", "8", "64", "64"]
    one = said(capsys, "plan clm-60m --gpu h100 --gpus 8 --nodes 8 --what-if train.seq-len=4096")
    assert "1,048,576" in one.split("what  ")[1], "512 rows of 2048: 64 GPUs"


def test_what_if_counts_gpus_without_their_name(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan clm-60m --gpus 8 --nodes 2 --what-if train.seq-len=4096")
    assert "262,144" in text.split("what  ")[1], "128 rows of 2048: 16 GPUs"
    with pytest.raises(ConfigError, match="--gpu"):
        run_verb(["plan", "clm-60m", "--what-if", "train.batch-size=auto"])


def test_the_header_says_of_which_machine_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    several = said(capsys, "plan clm-60m --gpu h100 --nodes 2,8")
    assert "are of h100-sxm x 16, the first below" in several
    assert "the first below" not in said(capsys, "plan clm-60m --gpu h100 --nodes 2")


def test_efficiency_is_of_one_kind_of_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert "efficiency" not in said(capsys, "plan clm-60m --gpu h100,l4 --gpus 8")
    text = said(capsys, "plan clm-60m --gpu h100,l4 --nodes 1,2")
    rows = [
        line.split() for line in text.splitlines() if " x 1 x 1 " in line and "layout" not in line
    ]
    assert [row[0] for row in rows if "100.0%" in row] == ["h100-sxm", "l4"]


def test_one_checkpoint_has_one_size(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan clm-60m --optim.name muon")
    assert text.count("807.9 MB") == 2
    assert "Muon's moment" in text
    assert "985.2" not in text
    assert said(capsys, "plan clm-60m").count("985.2 MB") == 2


def test_a_config_is_not_overwritten_nor_put_where_no_folder_is(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    run_verb(f"plan clm-60m -o {file}".split())
    with pytest.raises(ConfigError, match="--force"):
        run_verb(f"plan clm-200m -o {file}".split())
    assert "dim: 384" in file.read_text()
    run_verb(f"plan clm-200m -o {file} --force".split())
    assert "dim: 768" in file.read_text()
    with pytest.raises(ConfigError, match="is no folder"):
        run_verb(f"plan clm-60m -o {tmp_path / 'typo' / 'run.yaml'}".split())
    assert not (tmp_path / "typo").exists()
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(ConfigError, match="no YAML"):
        run_verb(f"plan clm-60m -o {other} --force".split())


class _Cpu:
    settings: ClassVar[dict[str, str | int]] = {"device": "cpu", "dtype": "fp32", "threads": 1}

    def measured(self, config: RunConfig, steps: int) -> tuple[RunConfig, list[str]]:
        return config, []


def test_float8_says_what_auto_is_here() -> None:
    config = load_config("clm-60m", {"train.float8": "rowwise"})
    with pytest.raises(ConfigError, match=r"needs train\.dtype bf16, and auto is fp32 on this"):
        resolve_here(config, _Cpu(), vocab_size=512, data_ranks=1, sizes=[])


def test_every_n_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan depth-12")
    assert "887,098,032 = 6 x 110,100,936" in text
    assert f"{6 * 110_100_936:,} (6 N, no attention; N is no-positions)" in text
    assert f"{6 * 286_261_704:,} (6 N, no attention, with embeddings; N is all)" in text
