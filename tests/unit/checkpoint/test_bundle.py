"""From a path to a model: every way to name it, and a sentence for every way to get it wrong."""

import shutil
from pathlib import Path

import pytest
import torch

from foundling.checkpoint.bundle import load_bundle
from foundling.checkpoint.paths import find_checkpoint
from foundling.checkpoint.writer import save
from foundling.config.errors import CheckpointError, UserError
from foundling.config.load import dump_yaml
from foundling.config.model import ModelConfig
from foundling.config.run import CheckpointConfig, RunConfig
from foundling.config.train import TrainConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.runtime.run_dir import RunDir
from foundling.tokenizer.bpe_trainer import train_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 10, as the trainer leaves it."""
    place = RunDir(tmp_path_factory.mktemp("runs") / "small")
    tokenizer = train_tokenizer(["the miller has a grey cat and a brown dog"] * 50, 300)
    tokenizer.save(place.tokenizer)
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32
    )
    config = RunConfig().replace(model=shape, train=TrainConfig(horizon=10, seq_len=32))
    place.config_path.write_text(dump_yaml(config))
    place.write_info({"chat": False, "status": "finished", "parent": None})
    for step in (2, 10):
        save(place.checkpoints, step, run_tensors(shape, step), {"step": step, "ledger": {}})
    return place.path


def run_tensors(shape: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    model = Transformer(shape)
    init_weights(model, seed)
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    moments = {f"optim.{n}.exp_avg": torch.ones_like(p) for n, p in model.named_parameters()}
    return {**weights, **moments}


def test_a_run_gives_its_newest_weights(run: Path) -> None:
    bundle = load_bundle(run)
    assert (bundle.step, bundle.path.name) == (10, "step-00000010")
    assert bundle.meta == {"step": 10, "ledger": {}}
    assert bundle.config.model.dim == 16
    assert bundle.tokenizer.decode(bundle.tokenizer.encode("a grey cat")) == "a grey cat"
    assert not bundle.model.training
    wanted = Transformer(bundle.config.model)
    init_weights(wanted, 10)
    tokens = torch.tensor([bundle.tokenizer.encode("the miller has")])
    assert torch.equal(bundle.model(tokens), wanted.eval()(tokens))


@pytest.mark.parametrize("name", ["{run}@2", "{run}/checkpoints/step-00000002", "{run}/@2"])
def test_a_step_can_be_named(run: Path, name: str) -> None:
    bundle = load_bundle(name.format(run=run))
    assert bundle.step == 2
    wanted = run_tensors(bundle.config.model, 2)
    assert all(torch.equal(t, wanted[f"model.{n}"]) for n, t in bundle.model.state_dict().items())


def test_a_relative_path_is_enough(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "checkpoints")
    assert find_checkpoint("step-00000002")[0].path == run
    monkeypatch.chdir(run)
    assert find_checkpoint(".")[1].name == "step-00000010"


def test_an_at_sign_in_a_name_is_no_step(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "me@2"
    place.symlink_to(run)
    assert find_checkpoint(place)[1].name == "step-00000010"
    assert find_checkpoint(f"{place}@2")[1].name == "step-00000002"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{run}/nowhere", "does not exist"),
        ("{run}/nowhere@3", "does not exist"),
        ("{run}/tokenizer", "is not a run"),
        ("{run}/config.yaml", "is not a run"),
        ("{run}@3", "no checkpoint of step 3; there are: 2, 10"),
        ("{run}/checkpoints/step-00000003", "does not exist"),
    ],
)
def test_a_wrong_path_is_one_sentence(run: Path, name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_bundle(name.format(run=run))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_without_its_tokenizer_says_where_that_belongs(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "tokenizer" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=f"put its tokenizer.json into {copy}/tokenizer to"):
        load_bundle(copy)
    (tmp_path / "tokenizer.json").rename(copy / "tokenizer" / "tokenizer.json")
    assert load_bundle(copy).step == 10


def test_a_run_without_a_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    RunDir(tmp_path / "new").write_info({"chat": False})
    with pytest.raises(CheckpointError, match="no whole checkpoint yet; train it first"):
        load_bundle(tmp_path / "new")


def test_damage_is_refused_when_named_and_passed_over_when_not(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    data = copy / "checkpoints" / "step-00000010" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    for name in (f"{copy}@10", str(data.parent)):
        with pytest.raises(CheckpointError, match="fails its checksum"):
            load_bundle(name)
    assert load_bundle(copy).step == 2
    assert "step-00000010" in capsys.readouterr().err
    shutil.rmtree(copy / "checkpoints" / "step-00000002")
    with pytest.raises(CheckpointError, match="checkpoint: step-00000010 is damaged; bring one"):
        load_bundle(copy)


def test_weights_of_another_shape_are_one_sentence(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("ffn_dim: 32", "ffn_dim: 64"))
    with pytest.raises(
        CheckpointError, match=r"does not fit its config: model\.layers\.0\.ffn"
    ) as caught:
        load_bundle(copy)
    assert "\n" not in str(caught.value)


def test_checkpoints_on_another_disk_are_found_through_the_config(
    run: Path, tmp_path: Path
) -> None:
    moved = RunDir(tmp_path / "small")
    shutil.copytree(run, moved.path, ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(run / "checkpoints", tmp_path / "scratch" / "small")
    config = RunConfig().replace(
        model=load_bundle(run).config.model,
        train=TrainConfig(horizon=10, seq_len=32),
        checkpoint=CheckpointConfig(folder=str(tmp_path / "scratch")),
    )
    moved.config_path.write_text(dump_yaml(config))
    bundle = load_bundle(moved.path)
    assert bundle.path == tmp_path / "scratch" / "small" / "step-00000010"
    assert bundle.run == moved.path
    assert load_bundle(f"{moved.path}@2").step == 2
