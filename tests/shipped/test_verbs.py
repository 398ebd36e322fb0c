"""Every verb on one small finished life: what scripts rely on, and the README's commands."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import final_scores
from tests.parity.exported import ask_both
from tests.unit.eval.small_bundle import write_bundle

ROOT = Path(__file__).parents[2]


def out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    run_verb(list(words))
    return capsys.readouterr().out


def test_eval_prints_what_scripts_rely_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("eval", str(home / "finetune"), "--json", "--questions", "30")
    scores = json.loads(out(capsys, *command))
    assert scores["full_bpb"] > scores["full_floor_bpb"] > 0
    quiz = scores["quiz"]
    assert quiz["n"] == 30
    assert 0 <= quiz["accuracy"] <= 1
    assert 0 <= quiz["documents_only"] <= 1
    assert quiz["stderr"] >= 0
    assert final_scores(RunDir(home / "finetune"))["quiz"]["n"] == 30
    part = json.loads(out(capsys, *command[:3], "--questions", "0"))
    assert part["quiz"] is None
    assert final_scores(RunDir(home / "finetune"))["quiz"]["n"] == 30


def test_eval_of_tasks_and_contamination(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "gsm8k" in out(capsys, "eval", "anything", "list")
    run = str(home / "pretrain")
    bundle = str(write_bundle(tmp_path / "eval_bundle.zip"))
    said = out(capsys, "eval", run, "core,bpb,knowledge", "--bundle", bundle, "--limit", "4")
    assert "CORE" in said
    assert "bits per byte" in said
    words = ("core,bpb,knowledge", "--bundle", bundle, "--limit", "4", "--json")
    scores = json.loads(out(capsys, "eval", run, *words))
    bits = scores["tasks"]["bpb"]
    assert (bits["name"], bits["n"], len(bits["by_source"])) == ("bpb_4_documents", 4, 1)
    followed = out(capsys, "eval", "--follow", run, *words).splitlines()
    assert scores["step"] in {json.loads(line)["step"] for line in followed}
    found = tmp_path / "found.json"
    data, tokenizer = str(home / "text"), str(home / "tokenizer")
    words = ("--against", "core", "--bundle", bundle, "--tokenizer", tokenizer, "-o", str(found))
    said = out(capsys, "data", "verify", data, *words)
    assert said.index("   checked  ") < said.index("documents share 13 words")
    with pytest.raises(ConfigError, match="--force to overwrite it"):
        run_verb(["data", "verify", data, *words])
    both = json.loads(out(capsys, "data", "verify", data, *words, "--force", "--json"))
    assert not both["wrong"]
    assert both["against"]
    again = ("copa", "--bundle", bundle, "--limit", "4", "--contaminated", str(found), "--json")
    assert "clean" in json.loads(out(capsys, "eval", run, *again))["tasks"]["copa"]


def test_runs_list_and_show(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs: list[dict[str, Any]] = json.loads(out(capsys, "runs", "list", str(home), "--json"))
    assert [(Path(run["path"]).name, run["stage"], run["status"]) for run in runs] == [
        ("finetune", "chat", "finished"),
        ("pretrain", "text", "finished"),
    ]
    assert runs[0]["parent"] == str(home / "pretrain")
    assert runs[1]["parent"] is None
    shown = json.loads(out(capsys, "runs", "show", str(home / "finetune"), "--json"))
    assert sum(shown["tokens_by_source"].values()) == shown["tokens"] == runs[0]["tokens"]
    assert {"path", "stage", "parent", "status"} <= set(shown)
    said = out(capsys, "runs", "show", str(home / "pretrain"))
    assert "steps                   30 (planned 30)" in said
    assert "finished" in out(capsys, "runs", "list", str(home))
    (home / "broken").mkdir()
    (home / "broken" / "run.json").write_text('{"sche')
    listed = json.loads(out(capsys, "runs", "list", str(home), "--json"))
    assert [run["status"] for run in listed] == ["damaged", "finished", "finished"]


def test_a_demo_of_another_seed_is_refused_in_the_same_folder(home: Path) -> None:
    from foundling.config.errors import RunError

    with pytest.raises(RunError, match="another scale or seed"):
        run_verb(["demo", "--scale", "tiny", "--seed", "2", "--folder", str(home)])


def test_inspect_generate_and_report(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = out(capsys, "data", "inspect", str(home / "chat"), "--rows", "1", "--ids")
    assert "<|assistant|>" in rows
    assert "positions" in rows
    pieces = out(
        capsys, "tokenizer", "inspect", str(home / "tokenizer"), "--encode", "Two mules", "--chat"
    )
    assert "<|user|>" in pieces
    said = out(capsys, "generate", str(home / "pretrain"), "About", "--max-tokens", "3")
    assert said.startswith("About")
    same = out(capsys, "generate", str(home / "pretrain"), "About", "--max-tokens", "3")
    assert said == same
    answer = out(capsys, "generate", str(home / "finetune"), "Hello", "--chat", "--max-tokens", "3")
    assert answer.endswith("\n")
    page = out(capsys, "report", str(home / "finetune")).strip()
    assert "<svg" in Path(page).read_text()
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", Path(page).read_text())


def test_chat_answers_what_is_piped_in(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "foundling", "chat", str(home / "finetune")],
        input="Hello!\nThank you.\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


def test_config_goes_out_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    run_verb(["plan", "hamlet", "--train.horizon", "3", "-o", str(file)])
    again = tmp_path / "again.yaml"
    assert "steps" in out(capsys, "plan", str(file), "-o", str(again))
    assert again.read_text() == file.read_text()


def test_an_exported_model_answers_in_transformers_token_for_token(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "hf")
    said = out(capsys, "convert", str(home / "finetune"), target, "--to", "hf")
    assert "result through transformers" in said
    answers = ask_both(home / "finetune", tmp_path / "hf", 5)
    assert answers.questions == answers.same == 5
    card = (tmp_path / "hf" / "README.md").read_text()
    for word in ("How it was raised", "pretrain", "finetune", "chat", "tokens read"):
        assert word in card


def test_convert_refuses_with_a_sentence_and_exit_code_2(home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foundling", "convert", str(home / "finetune")]
    done = subprocess.run(
        [*command, str(tmp_path / "meta"), "--to", "hf", "--push", "nowhere"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "is no OWNER/NAME of the hub: letters, digits" in done.stderr
    assert len([x for x in done.stderr.splitlines() if not x.startswith("convert: ")]) == 1
    assert not list(tmp_path.iterdir())
