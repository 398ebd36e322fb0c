"""A run from begin to end: it resumes to the same bits, counts once, and refuses what would lie."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from run_tools import assert_same, train_until, weights

from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.retention import latest
from foundling.config.errors import ConfigError, DataError, RunError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.eval import task_scoring
from foundling.model.transformer import Transformer
from foundling.plan.forecast import FIGURES
from foundling.runtime.lock import RunLock
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events
from foundling.train import evaluation
from foundling.train.loop import train
from foundling.train.setup import open_data


@pytest.fixture
def whole(tiny: RunConfig, tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "whole")
    train(tiny, run)
    return run


@pytest.mark.parametrize("steps", [1, 3, 4, 8])
def test_a_killed_run_goes_on_to_the_same_bits(
    steps: int, tiny: RunConfig, whole: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_until(tiny, RunDir(tmp_path / "killed"), steps, monkeypatch)
    train(tiny, run)
    assert_same(run, whole)
    assert [line["step"] for line in read_events(run).measured["evaluated"]] == [4, 8]


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {
        "positions": 64, "norm": "layer", "bias": "all",
        "activation": "relu", "dropout": 0.2, "tie_embeddings": False,
    },
    "depth": {
        "activation": "relu2", "norm": "rms-unscaled", "qk_norm": True, "embed_norm": True,
        "value_embeds": True, "residual_scales": True, "logit_softcap": 15.0,
        "windows": (16, 16, 16, 0), "tie_embeddings": False, "init": {"outputs": "zero"},
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_of_another_family_resumes_to_the_same_bits(
    family: str, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.replace(model=FAMILIES[family], data={"document_mask": True})
    runs = [RunDir(tmp_path / name) for name in ("whole", "killed")]
    train(config, runs[0])
    train(config, train_until(config, runs[1], 5, monkeypatch))
    assert_same(*runs)
    losses = [line["loss"] for line in read_lines(runs[0].metrics_path)]
    assert losses[-1] < losses[0]


def test_each_step_is_written_once_and_counts_agree(whole: RunDir) -> None:
    lines = read_lines(whole.metrics_path)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["total_tokens"] == sum(line["tokens"] for line in lines)
    for line in lines:
        assert line["targets"] <= line["tokens"] <= line["positions"] == 4 * 64
        assert line["non_padding"] == line["tokens"] / line["positions"]
        assert sum(read["tokens"] for read in line["sources"].values()) == line["tokens"]
        assert line["matmul_share"] > 0
        assert "mfu" not in line, "a CPU has no data sheet"
        assert line["memory_peak"] >= line["memory_allocated"] > 0
        assert 0 <= line["update_ratio"] < 1  # the last step has a rate of zero


def test_a_finished_run_is_whole(whole: RunDir, tiny: RunConfig) -> None:
    info = whole.read_info()
    assert info["status"] == "finished"
    plan = info["plan"]
    for name in ("parameters", "steps"):
        assert plan["predicted"][name] == plan["measured"][name]
    assert plan["measured"]["first_loss"] == pytest.approx(
        plan["predicted"]["first_loss"], rel=0.02
    )
    newest = latest(whole.checkpoints)
    assert newest is not None
    assert step_of(newest) == 8
    assert len(list_checkpoints(whole.checkpoints)) == tiny.checkpoint.keep
    with pytest.raises(RunError, match="is finished"):
        train(tiny, whole)


def stopped(tiny: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    return train_until(tiny, RunDir(folder), 5, monkeypatch)


def test_other_mathematics_is_refused_by_name(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(tiny, tmp_path / "run", monkeypatch)
    longer = tiny.replace(train={"horizon": 9})
    for changed, named in [
        (tiny.replace(optim={"lr": 0.5}), r"optim\.lr"),
        (tiny.replace(train={"seed": 9}), r"train\.seed"),
        (tiny.replace(train={"batch_size": 2}), r"train\.global_batch_tokens"),
        (tiny.replace(model={"layers": 1}), r"model\.layers"),
        (longer, r"another train\.horizon \('8 steps', now '9 steps'\); .*/run@STEP --train\.hor"),
    ]:
        with pytest.raises(RunError, match=named):
            train(changed, run)


def test_other_cadence_is_allowed_and_recorded(
    tiny: RunConfig, whole: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(tiny, tmp_path / "run", monkeypatch)
    train(tiny.replace(checkpoint={"every": 2, "keep": 5}), run)
    resumed = next(line for line in read_lines(run.events_path) if line["event"] == "resumed")
    assert resumed["changes"] == {"checkpoint.every": ["3", "2"], "checkpoint.keep": ["2", "5"]}
    assert_same(run, whole)


def test_a_run_whose_records_disagree_stops(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(tiny, tmp_path / "run", monkeypatch)
    lines = run.metrics_path.read_text().splitlines()
    edited = json.loads(lines[1])
    edited["tokens"] += 1
    run.metrics_path.write_text("\n".join([lines[0], json.dumps(edited), *lines[2:]]) + "\n")
    with pytest.raises(RunError, match="tokens and metrics"):
        train(tiny, run)
    run.metrics_path.write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(RunError, match="missing or double"):
        train(tiny, run)


def test_no_checkpoint_left_whole_is_not_a_fresh_start(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(tiny, tmp_path / "run", monkeypatch)
    for path in list_checkpoints(run.checkpoints):
        (path / "meta.json").write_text("{}")
    with pytest.raises(RunError, match="none of its checkpoints"):
        train(tiny, run)


def test_a_run_in_use_is_refused(tiny: RunConfig, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with RunLock(run.path), pytest.raises(RunError, match="in use by process"):
        train(tiny, run)


def test_data_that_changed_is_refused(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(next(iter(tiny.data.sources)))
    copy = tmp_path / "data"
    shutil.copytree(source, copy)
    config = tiny.replace(data={"sources": {str(copy): 1.0}})
    run = stopped(config, tmp_path / "run", monkeypatch)
    shutil.rmtree(copy)
    from foundling.data.build.build import build
    from foundling.data.open_source import open_source
    from foundling.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(source / "tokenizer")
    build(open_source("hamlet", seed=2), tokenizer, copy, name="x", kind="text", max_tokens=40_000)
    with pytest.raises(RunError, match="other data"):
        train(config, run)


def test_too_little_data_is_refused(tiny: RunConfig, tmp_path: Path) -> None:
    long = tiny.replace(train={"horizon": 10_000})
    with pytest.raises(ConfigError, match=r"data\.allow_repeat"):
        train(long, RunDir(tmp_path / "run"))
    assert not (tmp_path / "run" / "run.json").exists()


def test_epochs_of_one_source_are_whole(tiny: RunConfig, tmp_path: Path) -> None:
    config = tiny.replace(train={"horizon": "1.0 epochs", "batch_size": 32}, eval={"every": 0})
    run = RunDir(tmp_path / "run")
    train(config, run)
    from foundling.data.dataset import DataSet

    tokens = DataSet(next(iter(tiny.data.sources))).manifest.train_tokens
    eaten = read_lines(run.metrics_path)[-1]["total_tokens"]
    assert 0 <= tokens - eaten < 2 * 32 * 64  # never twice, and at most a step left unread


class TestFineTuning:
    @pytest.fixture
    def chatty(self, tiny: RunConfig, whole: RunDir, village: Any) -> RunConfig:
        return tiny.replace(
            train={"start": str(whole.path), "horizon": 4},
            data={"sources": {str(village.chat): 1.0, str(village.text): 1.0}},
        )

    def test_it_starts_from_its_parent_and_says_so(
        self, chatty: RunConfig, whole: RunDir, tmp_path: Path
    ) -> None:
        run = RunDir(tmp_path / "chat")
        still = chatty.replace(optim={"lr": 0.0}, train={"horizon": 1})
        train(still, run)
        assert run.read_info()["parent"] == {"path": str(whole.path), "step": 8}
        for name, tensor in weights(run).items():
            assert torch.equal(tensor, weights(whole)[name]), name

    def test_only_the_assistant_counts(self, chatty: RunConfig, tmp_path: Path) -> None:
        run = RunDir(tmp_path / "chat")
        train(chatty, run)
        line = read_lines(run.metrics_path)[0]
        assert 0 < line["targets"] < 0.9 * line["tokens"]
        assert len(line["sources"]) == 2

    def test_another_shape_or_vocabulary_is_refused(
        self, chatty: RunConfig, tmp_path: Path
    ) -> None:
        wide = chatty.replace(model={"dim": 64})
        with pytest.raises(ConfigError, match=r"model\.dim is 64 and the weights have 32; leave"):
            train(wide, RunDir(tmp_path / "a"))

    def test_conversations_on_fresh_weights_are_a_chat_run_with_a_warning(
        self, tiny: RunConfig, village: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = RunDir(tmp_path / "run")
        train(tiny.replace(data={"sources": {str(village.chat): 1.0}}), run)
        assert "the weights are fresh" in capsys.readouterr().err
        assert run.read_info()["chat"]

    def test_text_after_conversations_is_still_a_chat_run(
        self, chatty: RunConfig, tiny: RunConfig, whole: RunDir, tmp_path: Path
    ) -> None:
        first, then = RunDir(tmp_path / "chat"), RunDir(tmp_path / "text")
        train(chatty.replace(train={"horizon": 2}), first)
        train(tiny.replace(train={"start": str(first.path), "horizon": 2}), then)
        assert not whole.read_info()["chat"]
        assert first.read_info()["chat"]
        assert then.read_info()["chat"]


def test_a_failing_evaluation_does_not_end_training(
    tiny: RunConfig, whole: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foundling.train import evaluation

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(evaluation, "held_out_bpb", broken)
    run = RunDir(tmp_path / "run")
    train(tiny, run)
    assert run.read_info()["status"] == "finished"
    failed = [line for line in read_lines(run.events_path) if line["event"] == "failed"]
    assert [line["step"] for line in failed] == [4, 8]
    assert_same(run, whole)


def test_samples_and_scores_do_not_disturb_the_run(
    tiny: RunConfig, whole: RunDir, tmp_path: Path
) -> None:
    config = tiny.replace(
        eval={"every": 2, "prompts": ("About", "One")},
        log={"tensorboard": True},
    )
    run = RunDir(tmp_path / "run")
    train(config, run)
    assert_same(run, whole)
    samples = read_events(run).measured["sampled"]
    assert [line["step"] for line in samples] == [2, 4, 6, 8]
    assert [said["prompt"] for said in samples[0]["samples"]] == ["About", "One"]
    assert list(run.tensorboard.iterdir())
    scores = read_events(run).measured["evaluated"]
    assert scores[-1]["floor_bpb"] < scores[-1]["bpb"]


def test_a_wrong_tokenizer_is_refused(tiny: RunConfig, tmp_path: Path) -> None:
    from foundling.tokenizer.bpe_trainer import train_tokenizer

    train_tokenizer(["some other words entirely " * 50], 300).save(tmp_path / "other")
    config = tiny.replace(data={"tokenizer": str(tmp_path / "other")})
    with pytest.raises(DataError, match="tokenizer"):
        train(config, RunDir(tmp_path / "run"))
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_missing_wandb_is_named_before_anything_is_written(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now fails
    config = tiny.replace(log={"wandb": "offline"})
    with pytest.raises(ConfigError, match=r"foundling\[wandb\]"):
        train(config, RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_refused_run_leaves_nothing_behind(tiny: RunConfig, tmp_path: Path) -> None:
    too_small = tiny.replace(model={"vocab_size": 100})
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        train(too_small, RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_says_what_it_is(whole: RunDir, tiny: RunConfig) -> None:
    newest = latest(whole.checkpoints)
    assert newest is not None
    meta = load_meta(newest)
    assert meta["step"] == 8
    assert meta["config"]["optim"]["lr"] == tiny.optim.lr
    assert meta["config"]["train"]["dtype"] == "fp32"
    assert meta["parent"] is None
    assert set(meta["versions"]) == {"foundling", "torch", "python"}
    assert sum(eaten["tokens"] for eaten in meta["ledger"].values()) > 0


def test_the_end_tells_predicted_and_measured(
    tiny: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from foundling.runtime import console

    console.console.cache_clear()
    train(tiny, RunDir(tmp_path / "run"))
    console.console.cache_clear()
    said = capsys.readouterr().out
    assert "steps                   8 (planned 8)" in said
    assert "loss of the first step  6" in said
    assert set(RunDir(tmp_path / "run").read_info()["plan"]["measured"]) == set(FIGURES)


@pytest.mark.parametrize("steps", ["5", "33"])
def test_a_run_is_held_to_its_plan_however_short(
    steps: str,
    tiny: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from foundling.runtime import console
    from foundling.train import setup

    monkeypatch.setattr(setup, "predict_run", lambda *_: {"step_s": 1e-6})
    console.console.cache_clear()
    train(tiny.replace(train={"horizon": int(steps)}), RunDir(tmp_path / "run"))
    console.console.cache_clear()
    said = capsys.readouterr()
    assert said.out.count("a step was planned at 1e-06 s and is") == 1
    assert said.err.count("slower than planned") == 1
    assert "(planned 1e-06 s, +" in said.out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_are_made_in_trainings_arithmetic(
    dtype: torch.dtype, tiny: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that was chosen for 16 bits takes no others."""
    asked = []

    class Asked(Exception):  # noqa: N818
        pass

    def engine(*_: object, **given: object) -> None:
        asked.append(given["dtype"])
        raise Asked

    monkeypatch.setattr(task_scoring, "Engine", engine)
    layout = SimpleNamespace(tensor=2)
    model = Transformer(ModelConfig(vocab_size=8, dim=8, layers=1, heads=1, ffn_dim=8))
    state = SimpleNamespace(
        model=model,
        device=torch.device("cpu"),
        dtype=dtype,
        step=1,
        mesh=SimpleNamespace(layout=layout),
    )
    tokenizer = SimpleNamespace(bos_id=0, encode=lambda text: [1])
    parts = SimpleNamespace(
        settings=tiny.eval, train=tiny.train, tokenizer=tokenizer, is_chat=False
    )
    with pytest.raises(Asked):
        evaluation.Evaluation._sample(cast("Any", parts), cast("Any", state))
    assert asked == [None if dtype == torch.float32 else dtype]


def test_a_data_set_that_is_not_there_is_named(tiny: RunConfig, tmp_path: Path) -> None:
    """And not its tokenizer, which nobody could train."""
    config = tiny.replace(data={"sources": {str(tmp_path / "none"): 1.0}})
    with pytest.raises(DataError, match=r"none does not exist; .*foundling data build"):
        open_data(config)
