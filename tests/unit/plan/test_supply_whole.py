"""The plan says what train will say about the data, and what is an estimate."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from foundling.cli.main import run_verb
from foundling.config.data_manifest import Manifest
from foundling.config.errors import ConfigError, DataError
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.plan.horizon import plan_horizon
from foundling.plan.supply import known_sizes
from foundling.train.setup import open_data

SMALL = "--model.dim 32 --model.heads 2 --model.ffn-dim 64 --model.layers 2 --train.seq-len 64"


@pytest.fixture
def folder(village: Any, tmp_path: Path) -> Path:
    """A copy of the documents that may be broken."""
    return Path(shutil.copytree(village.text, tmp_path / "text"))


def said(capsys: pytest.CaptureFixture[str], folder: Path, more: str = "") -> str:
    capsys.readouterr()
    run_verb(f"plan hamlet --data.sources {folder} --train.horizon 8 {SMALL} {more}".split())
    return capsys.readouterr().out


def refused_by_train(folder: Path) -> str:
    config = load_config("hamlet", {"data.sources": str(folder), "train.horizon": "8"})
    with pytest.raises((ConfigError, DataError)) as caught:
        open_data(config)
    return str(caught.value)


def test_whole_data_is_not_complained_about(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, folder)
    assert "1 of 1 shards there, 1 needed" in text
    assert "train will refuse" not in text


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_a_shard_that_is_not_whole_is_not_counted(
    damage: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = folder / Manifest.load(folder).train[0].name
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    text = said(capsys, folder)
    assert "0 tokens of" in text
    assert "0 of 1 shards there" in text
    assert f"train will refuse: {refused_by_train(folder)}" in text


def test_a_missing_or_another_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "tokenizer" / "tokenizer.json"
    changed = file.read_text().replace("<|user|>", "<|resu|>")
    file.write_text(changed)
    (folder / "tokenizer" / "tokenizer_config.json").unlink()
    assert "was built with tokenizer" in said(capsys, folder)
    assert "was built with tokenizer" in refused_by_train(folder)
    shutil.rmtree(folder / "tokenizer")
    assert "tokenizer is missing" in said(capsys, folder)
    refused_by_train(folder)


@pytest.mark.parametrize("packing", ["bestfit", "bucket", "pad"])
def test_tokens_of_rows_that_are_not_full_are_about(
    packing: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "8 steps, about " in said(capsys, folder, f"--data.packing {packing}")


def test_tokens_of_full_rows_are_exact(tiny: RunConfig) -> None:
    assert plan_horizon(load_config("clm-60m", {"data.packing": "concat"}), 1).tokens_exact
    assert not plan_horizon(load_config("clm-60m"), 1).tokens_exact, "bestfit leaves gaps"
    padded = tiny.replace(data={"packing": "bestfit"})
    config, sizes = known_sizes(padded)
    assert not plan_horizon(config, 1, sizes).tokens_exact
