"""lm: tasks of `foundling eval`, and how the installed harness comes to know our model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, DataError
from foundling.config.run import RunConfig
from foundling.eval.lm_eval_run import Harness, register, unregister
from foundling.tasks.registry import Registry
from tests.parity.lm_eval_scene import train_run, write_tasks

HOOKED = """
import site, sys
site.addsitedir({site!r})
assert "lm_eval" not in sys.modules
from lm_eval.api.registry import get_model, model_registry
print(get_model("foundling").__module__, "hf" in model_registry)
"""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'foundling\[lm-eval\]'"):
        run_verb(["eval", "runs/a", "lm:nine"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["bpb", "--cache", "answers"],
            "--cache has no effect without tasks of lm-eval, such as lm:mmlu",
        ),
        (["bpb", "--run-code"], "--run-code has no effect without tasks of lm-eval"),
        (["lm:mmlu", "--samples", "3"], "--samples has no effect on lm: tasks"),
        (["lm:mmlu,lm:drop", "--data", "web"], "--data has no effect on lm: tasks"),
        (["lm:mmlu", "--system", "Be brief."], "--system needs --ask chat"),
        (["--max-length", "64"], "--max-length has no effect without a list of tasks"),
    ],
)
def test_an_option_of_other_tasks_is_refused_by_name(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run_verb(["eval", "runs/a", *words])


def test_the_clock_of_a_run_has_no_tasks_of_the_harness() -> None:
    with pytest.raises(ConfigError, match=r"only `foundling eval SRC lm:mmlu` asks"):
        Registry().find(["lm:mmlu"])


def test_the_hook_is_written_and_taken_back(tmp_path: Path) -> None:
    assert [path.suffix for path in register(tmp_path)] == [".py", ".pth"]
    assert len(unregister(tmp_path)) == 2
    assert list(tmp_path.iterdir()) == []
    assert unregister(tmp_path) == []
    with pytest.raises(ConfigError, match=r"cannot be written.*python -m foundling\.eval\.lm"):
        register(tmp_path / "nowhere")


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore")
def test_scores_stand_beside_our_own_tasks(
    village_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    run, tasks = train_run(village_config, tmp_path / "run"), write_tasks(tmp_path / "tasks")
    words = ["--include-path", str(tasks), "--device", "cpu", "--limit", "5"]
    capsys.readouterr()
    asked = "spelling,lm:village_choice,lm:village_text"
    run_verb(["eval", str(run), asked, *words, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["asked"] == ["lm-eval-village_choice", "lm-eval-village_text", "spelling"]
    folder = run / "evals" / "step-2"
    scores = json.loads((folder / "scores.json").read_text())
    assert (scores["schema"], scores["step"], sorted(scores["tasks"])) == (1, 2, told["asked"])
    text = scores["tasks"]["lm-eval-village_text"]
    lines = [
        json.loads(x) for x in (folder / "lm-eval-village_text.jsonl").read_text().split("\n") if x
    ]
    assert [line["id"] for line in lines] == ["0", "1", "2", "3", "4"]
    assert text["metric"] == "bits_per_byte"
    assert text["value"] == pytest.approx(text["metrics"]["bits_per_byte,none"], rel=1e-9)
    run_verb(["eval", str(run), "lm:village_written", *words])
    printed = capsys.readouterr().out
    assert "lm-eval-village_written" in printed
    assert "spelling" not in printed  # which nobody asked for now
    assert "exact_match, 0 shots" in printed
    assert len(json.loads((folder / "scores.json").read_text())["tasks"]) == 4


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore")
def test_questions_that_cannot_be_had_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")

    def unreachable(**options: object) -> None:
        raise ConnectionError("Couldn't reach 'some/set' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(lm_eval, "simple_evaluate", unreachable)
    harness = Harness(["village_choice"], include_path=write_tasks(tmp_path / "tasks"))
    with pytest.raises(DataError, match=r"could not get the questions \(Couldn't reach 'some/set'"):
        harness.run(None)


def test_a_task_that_the_harness_lacks_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    with pytest.raises(ConfigError, match="lm-eval has no task vilage_choice"):
        run_verb(["eval", str(tmp_path / "nowhere"), "lm:vilage_choice"])


def test_lm_eval_itself_finds_the_model(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    register(tmp_path)
    code = HOOKED.format(site=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["foundling.eval.lm_eval_adapter", "True"], done.stderr[-2000:]
