"""Names that other trainers use are answered with ours, in YAML and as flags."""

from pathlib import Path

import pytest

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError
from foundling.config.load import NAMES, foreign_names, load_config

OURS = {f"{section}.{name}" for section, names in NAMES.items() for name in names}
SAID = {
    "optim.learning_rate": "it is optim.lr here.",
    "train.learning-rate": "it is optim.lr here.",
    "model.hidden_size": "it is model.dim here.",
    "model.num_hidden_layers": "it is model.layers here.",
    "model.n_embd": "it is model.dim here.",
    "model.intermediate_size": "it is model.ffn_dim here.",
    "train.num_steps": "it is train.horizon here.",
    "train.max_steps": "it is train.horizon here.",
    "train.weight_decay": "did you mean optim.weight_decay?",
    "train.per_device_train_batch_size": "it is train.batch_size here.",
    "train.seq_length": "it is train.seq_len here.",
    "optim.warmup_ratio": "it is optim.warmup here.",
    "optim.beta2": "it is one of the two numbers of optim.betas here, such as [0.9, 0.95].",
    "train.global_batch_size": "set train.global_batch_tokens, which counts tokens and not rows, to"
    " 7 x train.seq_len.",
    "train.gradient_accumulation_steps": "set train.global_batch_tokens to train.batch_size x"
    " train.seq_len x processes x 7.",
    "model.depth": "name the preset depth-7, or set the number of blocks with model.layers.",
    "model.max_position_embeddings": "it is train.seq_len here, and model.positions too where"
    " they are learned.",
    "training.local_batch_size": "it is train.batch_size here.",
    "lr_scheduler.warmup_steps": "it is optim.warmup here.",
    "eval.interval": "it is eval.every here.",
    "checkpoint.interval": "it is checkpoint.every here.",
    "evl.every": "did you mean eval.every?",
}


@pytest.mark.parametrize("written", SAID)
def test_a_name_of_another_trainer_is_answered_with_ours(written: str, tmp_path: Path) -> None:
    section, name = written.replace("-", "_").split(".")
    wanted = f"unknown setting {section}.{name}; {SAID[written]}"
    (tmp_path / "run.yaml").write_text(f"preset: hamlet\n{section}: {{{name}: 7}}\n")
    for target, flags in (("hamlet", {written: "7"}), (str(tmp_path / "run.yaml"), {})):
        with pytest.raises(ConfigError) as refused:
            load_config(target, flags)
        assert str(refused.value).removeprefix(f"{tmp_path}/run.yaml: ") == wanted


def test_no_section_is_needed_to_be_understood(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for flag, name, said in (
        ("--learning-rate=3e-4", "learning_rate", "it is {}optim.lr here."),
        ("--weight_decay=3e-4", "weight_decay", "did you mean {}optim.weight_decay?"),
        ("--grad-clip=3e-4", "grad_clip", "it is {}optim.clip here."),
        ("--min-lr=3e-4", "min_lr", "set optim.final_lr_share to 3e-4 divided by optim.lr."),
    ):
        path.write_text(f"{name}: '3e-4'\n")
        with pytest.raises(ConfigError) as refused:
            load_config(str(path))
        assert str(refused.value) == f"{path}: unknown setting {name}; {said.format('')}"
        written = flag.partition("=")[0].replace("_", "-")
        for words in ([flag], flag.split("=")):
            with pytest.raises(ConfigError) as refused:
                run_verb(["plan", "hamlet", *words])
            wanted = f"{written} is no option of foundling plan; {said.format('--')}"
            assert str(refused.value) == wanted


def test_the_table_names_settings_there_are_and_hides_none() -> None:
    own_names, remedies = foreign_names()
    assert set(own_names.values()) <= OURS
    assert not set(own_names) & set(remedies)
    own = {name for names in NAMES.values() for name in names}
    assert not {*own_names, *remedies} & {*OURS, *own}
    for remedy in remedies.values():
        words = remedy.replace(",", " ").split()
        named = {word for word in words if word.split(".")[0] in NAMES and "." in word}
        assert named <= OURS
