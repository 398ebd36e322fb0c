"""Numbers that no run could be made of are refused by name."""

import re
from pathlib import Path

import pytest

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.run import RunConfig


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("optim.betas", "1,0.95", "optim.betas[0] must be below 1"),
        ("optim.betas", "[0.9, 1.0]", "optim.betas[1] must be below 1"),
        ("optim.eps", "1e-60", "optim.eps is at least 1.17e-38"),
        ("train.threads", "100000", "train.threads is at most 1,024"),
        ("train.seq_len", "1" + "0" * 18, "train.seq_len is at most 2,147,483,647"),
        ("data.phases", f"[{{at: 0.5, seq_len: {2**31}}}]", "data.phases.seq_len is at most"),
        ("model.vocab_size", "1" + "0" * 18, "model.vocab_size is at most 268,435,456"),
        ("model.ffn_dim", "1" + "0" * 30, "model.ffn_dim is at most 268,435,456"),
        ("data.sources", "{a: " * 20_000 + "}" * 20_000, "nested too deeply"),
        ("model.init.std", "1e400", "model.init.std must be finite"),
        ("optim.weight_decay", "1e400", "optim.weight_decay must be finite"),
    ],
)
def test_a_number_that_torch_could_not_take_is_refused(setting: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config("hamlet", {setting: value})


def test_a_limit_may_be_infinite_and_a_phase_may_not(tmp_path: Path) -> None:
    """In a file, where YAML knows how to write it."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {allow_repeat: .inf}\noptim: {clip: .inf}\n")
    config = load_config(str(file))
    assert config.data.allow_repeat == config.optim.clip == float("inf")
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    for text, said in (
        ("optim: {lr: .inf}", "optim.lr must be finite"),
        ("data: {allow_repeat: .nan}", "data.allow_repeat must be positive"),
        ("data: {phases: [{at: .inf, seq_len: 8}]}", "data.phases.at must be finite"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_config(str(file))


@pytest.mark.parametrize("windows", ["1K,0", "[1K, 0]"])
def test_a_list_takes_numbers_as_people_write_them(windows: str, tmp_path: Path) -> None:
    assert load_config("llama-1.24b", {"model.windows": windows}).model.windows == (1000, 0)
    path = tmp_path / "run.yaml"
    path.write_text("preset: llama-1.24b\nmodel: {windows: [1K, 0]}\n")
    assert load_config(str(path)).model.windows == (1000, 0)
