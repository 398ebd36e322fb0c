"""`foundling eval lm`, and how the installed harness comes to know our model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig
from foundling.eval.lm_eval_run import register, unregister
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
    with pytest.raises(ConfigError, match="needs a model and --tasks"):
        run_verb(["eval", "lm", "runs/a"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'foundling\[lm-eval\]'"):
        run_verb(["eval", "lm", "runs/a", "--tasks", "nine"])


def test_the_hook_is_written_and_taken_back(tmp_path: Path) -> None:
    assert [path.suffix for path in register(tmp_path)] == [".py", ".pth"]
    assert len(unregister(tmp_path)) == 2
    assert list(tmp_path.iterdir()) == []
    assert unregister(tmp_path) == []
    with pytest.raises(ConfigError, match=r"cannot be written.*python -m foundling\.eval\.lm"):
        register(tmp_path / "nowhere")


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore")
def test_the_verb_leaves_results_to_compare(
    village_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    run, tasks = train_run(village_config, tmp_path / "run"), write_tasks(tmp_path / "tasks")
    words = ["eval", "lm", str(run), "--include-path", str(tasks), "--device", "cpu", "--json"]
    capsys.readouterr()
    run_verb([*words, "--tasks", "village_choice,village_text", "--limit", "5"])
    told = json.loads(capsys.readouterr().out)
    folder = run / "evals" / "step-2"
    scores = json.loads((folder / "scores.json").read_text())
    assert (scores["schema"], scores["step"], set(scores["tasks"])) == (1, 2, set(told))
    text = scores["tasks"]["lm-eval-village_text"]
    lines = [
        json.loads(x) for x in (folder / "lm-eval-village_text.jsonl").read_text().split("\n") if x
    ]
    assert [line["id"] for line in lines] == ["0", "1", "2", "3", "4"]
    assert text["metric"] == "bits_per_byte"
    assert text["value"] == pytest.approx(text["metrics"]["bits_per_byte,none"], rel=1e-9)
    run_verb([*words, "--tasks", "village_written"])
    assert len(json.loads((folder / "scores.json").read_text())["tasks"]) == 3


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore")
def test_questions_that_cannot_be_had_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from foundling.config.errors import DataError
    from foundling.eval.lm_eval_run import HarnessRequest, run_harness

    def unreachable(**options: object) -> None:
        raise ConnectionError("Couldn't reach 'some/set' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(lm_eval, "simple_evaluate", unreachable)
    asked = HarnessRequest(tasks=["village_choice"], include_path=write_tasks(tmp_path / "tasks"))
    with pytest.raises(DataError, match=r"could not get the questions \(Couldn't reach 'some/set'"):
        run_harness(None, asked)


def test_lm_eval_itself_finds_the_model(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    register(tmp_path)
    code = HOOKED.format(site=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["foundling.eval.lm_eval_adapter", "True"], done.stderr[-2000:]
