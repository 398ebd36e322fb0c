"""The report: one whole file, nothing fetched, nothing let through, nothing required."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_fakes import EVIL, make_run, metrics_line, write_final

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, RunError
from foundling.report.page import write_report
from foundling.report.runs import list_runs
from foundling.runtime.run_dir import RunDir

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order, and collects what a reader or a browser would."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        kept = self.scripts if self.open[-1:] in (["script"], ["style"]) else self.words
        kept.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunDir, RunDir]:
    base = make_run(tmp_path / "runs" / "base")
    chat = make_run(
        tmp_path / "runs" / "chat",
        chat=True,
        parent={"path": str(base.path), "step": 30},
        steps=20,
    )
    write_final(chat)
    return base, chat


def read(run: RunDir, out: Path | None = None) -> Page:
    return Page(write_report([run], out).read_text())


def test_it_lies_in_the_last_run_or_where_it_is_asked_for(
    runs: tuple[RunDir, RunDir], tmp_path: Path
) -> None:
    base, chat = runs
    assert write_report([base, chat]) == chat.report_path
    assert write_report([base], tmp_path / "there.html") == tmp_path / "there.html"
    assert write_report([base], tmp_path) == tmp_path / "report.html"
    for there in (tmp_path, tmp_path / "there.html"):
        with pytest.raises(ConfigError, match="--force to overwrite it"):
            write_report([base], there)
        write_report([base], there, force=True)
    assert write_report([chat], chat.path) == chat.report_path, "the run's own is always replaced"
    with pytest.raises(RunError, match="at least one run"):
        write_report([])
    with pytest.raises(RunError, match="does not exist"):
        write_report([RunDir(tmp_path / "nothing")])


def test_nothing_is_fetched(runs: tuple[RunDir, RunDir]) -> None:
    text = write_report([runs[1]]).read_text()
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not any(name in ("src", "srcset", "action", "onclick") for name, _ in page.attributes)
    links = [value for name, value in page.attributes if name == "href"]
    assert links
    assert all(value and value.startswith("#") and value[1:] in page.ids for value in links)
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name space, which nobody opens
    assert "@import" not in text
    assert "url(" not in text


def test_what_a_model_says_stays_text(runs: tuple[RunDir, RunDir]) -> None:
    text = write_report([runs[1]]).read_text()
    page = Page(text)
    assert "alert(" not in " ".join(page.scripts)
    assert "<b>bold</b>" not in text
    assert text.count("<script") == text.count("</script>")
    assert f"said at 20 {EVIL}" in page.text


def test_the_lineage_is_followed_and_compared(runs: tuple[RunDir, RunDir]) -> None:
    page = read(runs[1])
    assert page.text.index("Pretraining: base") < page.text.index("Fine-tuning: chat")
    assert "What changed since base" in page.text
    assert "train.start (empty) runs/hamlet" in page.text
    assert len(page.ids) == len(set(page.ids))
    alone = read(runs[0])
    assert "Fine-tuning" not in alone.text
    assert "What changed" not in alone.text


def test_runs_moved_together_still_find_each_other(
    runs: tuple[RunDir, RunDir], tmp_path: Path
) -> None:
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    page = read(RunDir(tmp_path / "elsewhere" / "chat"))
    assert "Pretraining: base" in page.text
    shutil.rmtree(tmp_path / "elsewhere" / "base")
    assert "not found" in read(RunDir(tmp_path / "elsewhere" / "chat")).text


def test_a_circle_of_parents_ends(tmp_path: Path) -> None:
    base, chat = ({"path": str(tmp_path / name), "step": 30} for name in ("base", "chat"))
    make_run(tmp_path / "base", parent=chat)
    run = make_run(tmp_path / "chat", chat=True, parent=base)
    page = read(run)
    assert "Pretraining: base" in page.text
    assert "Fine-tuning: chat" in page.text


def test_numbers_stand_with_their_errors(runs: tuple[RunDir, RunDir]) -> None:
    page = read(runs[1])
    assert "96.2% ± 0.9%, 400 questions" in page.text or "96.2% ± 1.0%, 400" in page.text
    assert "right, of facts that stood in documents only 91.0% 150 ± 2.3%" in page.text
    assert "right, of sums" not in page.text  # none were asked
    assert "train time 1 min 40 s 1 min 50 s +10.0%" in page.text
    assert "parameters 1,000 1,000 exact" in page.text
    assert "memory bytes 500 MB not measured" in page.text
    assert "letter 0.500 0.400 +0.100" in page.text
    assert "everything 0.510 0.410 +0.100" in page.text
    assert "floor 0.250" in page.text


def test_every_chart_can_be_read_aloud(runs: tuple[RunDir, RunDir]) -> None:
    text = write_report([runs[0]]).read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(drawings) >= 6
    for drawing in drawings:
        assert re.search(r"<title id=\"(\w+)\">[^<]+</title><desc id=\"\w+\">[^<]+</desc>", drawing)
        assert 'role="img"' in drawing
    assert "Training loss in nats per token over 3k tokens: from 8.000 to 0.267" in text
    for title in ("Loss", "Learning rate", "Gradient norm", "Throughput", "bits per byte"):
        assert title in text


def test_a_report_is_small_and_keeps_the_spike_of_a_long_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", steps=1)
    lines = [{**metrics_line(step), "loss": 2.0} for step in range(1, 30001)]
    lines[17000]["loss"] = 77.0
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report([run]).read_text()
    assert len(text) < 400_000
    assert "greatest 77.000" in text
    band = re.search(r'<polygon points="([^"]+)" class="band"', text)
    assert band
    heights = [float(place.split(",")[1]) for place in band[1].split()]
    assert min(heights) < 40 < 250 < sorted(heights)[1]  # one point stands high above the rest


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "young")
    run.path.mkdir()
    run.write_info({"status": "running"})
    run.metrics_path.write_text('{"step": 1, "loss": 2.0, "total')  # torn by a kill
    run.events_path.write_text("{")
    page = read(run)
    assert "running" in page.text
    assert "Nothing was recorded." in page.text
    assert "holds no config.yaml" in page.text
    run.config_path.write_text("nonsense: 1\n")
    assert "unknown section nonsense" in read(run).text


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics.jsonl", b"[" * 100_000),
        ("metrics.jsonl", b"\xff\xfe"),
        ("metrics.jsonl", b'{"step": "7"}'),
        ("metrics.jsonl", b'{"step": 1, "sources": {"a": {"units": "x"}}}'),
        ("events.jsonl", b"7"),
        ("events.jsonl", b'{"event": "evaluated", "step": "7"}'),
        ("events.jsonl", b'{"event": "resumed"}'),
    ],
)
def test_a_damaged_run_is_called_so_and_hides_no_other(
    name: str,
    line: bytes,
    runs: tuple[RunDir, RunDir],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, chat = runs
    path = base.path / name
    path.write_bytes(line + b"\n" + (path.read_bytes() if path.is_file() else b""))
    listed = {run["path"]: run["status"] for run in list_runs(tmp_path)}
    assert listed == {str(base.path): "finished", str(chat.path): "finished"}  # reads ends only
    told = f"{name} has 1 damaged line, left out here"
    run_verb(["runs", "show", str(base.path)])
    shown = capsys.readouterr().out
    assert told in shown
    assert ", damaged at step 30" in shown
    assert told in write_report([chat]).read_text()


def test_many_samples_are_thinned_and_kept_behind_a_fold(tmp_path: Path) -> None:
    run = make_run(tmp_path / "talker", steps=400)
    page = read(run)
    assert "All 40 rounds of samples" in page.text
    assert "said at 10 " in page.text
    assert "said at 400 " in page.text


def test_the_report_does_not_load_torch() -> None:
    code = "import sys, foundling.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
