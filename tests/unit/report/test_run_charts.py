"""Every score and the loss over the whole life of a model, stage by stage."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from run_fakes import make_run, write_final

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, RunError
from foundling.report.lineage import score_series, stages_of
from foundling.report.page import write_report
from foundling.report.svg_chart import BinWidth, Chart, Curve, Level, by_width, colour_of, draw
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import read_lineage


def write_scored(run: RunDir, step: int, value: float, **more: Any) -> None:
    folder = run.path / "evals" / f"step-{step}"
    folder.mkdir(parents=True)
    tasks = {"arc": {"value": value, "metric": "accuracy", "n": 50, "stderr": 0.07}}
    scores = {"schema": 1, "step": step, "tasks": tasks, "core": None, **more}
    (folder / "scores.json").write_text(json.dumps(scores))


@pytest.fixture
def last(tmp_path: Path) -> RunDir:
    """A root of 30 steps of 100 tokens, a branch from its step 20, a chat from that one's 25."""
    root = make_run(tmp_path / "root")
    branch = make_run(
        tmp_path / "branch", parent={"path": str(root.path), "step": 20, "kind": "branch"}
    )
    chat = make_run(tmp_path / "chat", chat=True, parent={"path": str(branch.path), "step": 25})
    write_scored(root, 10, 0.3)
    write_scored(root, 30, 0.9)  # after the branch left: of another life
    write_scored(branch, 10, 0.3)
    write_scored(branch, 25, 0.4, core={"value": 0.11, "stderr": 0.01})
    write_scored(chat, 30, 0.6)
    write_final(chat)
    return chat


def test_stages_follow_each_other_in_tokens(last: RunDir) -> None:
    stages = stages_of(read_lineage(last))
    assert [stage.data.name for stage in stages] == ["root", "branch", "chat"]
    assert [(s.offset, s.begin, s.end) for s in stages] == [
        (0, 0, 2000),
        (0, 2000, 2500),
        (2500, 2500, 5500),
    ]
    assert [stage.loss()[0][0] for stage in stages] == [100, 2100, 2600]
    assert [stage.loss()[-1][0] for stage in stages] == [2000, 2500, 5500]


def test_every_score_stands_at_its_tokens_and_once(last: RunDir) -> None:
    series = score_series(stages_of(read_lineage(last)))
    assert list(series) == ["core", "bpb", "loss", "full_bpb", "quiz", "arc"]
    arc = [(p.tokens, p.value, p.stderr) for _, points in series["arc"] for p in points]
    assert arc == [(1000, 0.3, 0.07), (2500, 0.4, 0.07), (5500, 0.6, 0.07)]
    assert [(p.tokens, p.value) for _, points in series["core"] for p in points] == [(2500, 0.11)]
    assert [p.value for _, points in series["quiz"] for p in points] == [0.9625]
    bits = [p.tokens for _, points in series["bpb"] for p in points]
    assert bits == [1000, 2000, 3500, 4500, 5500]
    assert [(p.tokens, p.value) for _, points in series["full_bpb"] for p in points] == [
        (5500, 0.51)
    ]


def test_the_tokens_of_a_branch_are_counted_once(last: RunDir) -> None:
    page = write_report([last]).read_text()
    assert "5.5k" in page
    assert "2k + 500 + 3k" in page


def test_the_page_shows_them_with_the_stages_marked(last: RunDir) -> None:
    page = write_report([last], widths=[BinWidth(500), BinWidth(1000)]).read_text()
    life = page[page.index("The whole life") : page.index('class="run"')]
    assert life.count("<figure") == 2 + 6
    assert life.count('class="boundary"') == 2 * 8
    assert "each point the mean over 500 tokens" in life
    assert "each point the mean over 1k tokens" in life
    assert "Stages: root from 0, branch from 2k, chat from 2.5k tokens on." in life
    assert life.count('class="error"') >= 5


def test_bins_have_the_width_that_was_asked_for(last: RunDir) -> None:
    page = write_report([last], widths=[BinWidth(1000)]).read_text()
    life = page[page.index("The whole life") :]
    data = re.search(r'<script type="application/json">(.*?)</script>', life)
    assert data is not None
    curves = {curve["label"]: curve["points"] for curve in json.loads(data[1])}
    assert [len(points) for points in curves.values()] == [3, 1, 4]
    bins = by_width([(0.0, 1.0), (99.0, 3.0), (100.0, 9.0), (350.0, 4.0)], 100.0)
    assert [(b.mean, b.low, b.high) for b in bins] == [(2, 1, 3), (9, 9, 9), (4, 4, 4)]


def test_too_narrow_bins_are_refused(last: RunDir) -> None:
    with pytest.raises(RunError, match=r"--bins 1 cuts 5\.5k tokens.*larger width"):
        write_report([last], widths=[BinWidth(1)])
    assert not last.report_path.exists()


def test_a_single_run_has_no_second_copy_of_its_curves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "alone")
    assert "The whole life" not in write_report([run]).read_text()
    write_scored(run, 30, 0.5)
    assert "The whole life" in write_report([run]).read_text()


def test_a_mean_of_fewer_tasks_is_no_point_of_core(last: RunDir) -> None:
    write_scored(last, 20, 0.5, core={"name": "core_partial", "value": 0.2, "stderr": 0.01})
    series = score_series(stages_of(read_lineage(last)))
    assert [p.value for _, points in series["core"] for p in points] == [0.11]
    assert [p.value for _, points in series["core_partial"] for p in points] == [0.2]


def test_damaged_scores_leave_only_their_part_out(last: RunDir) -> None:
    (last.path / "evals" / "step-30" / "scores.json").write_text('{"tasks": [')
    folder = last.path / "evals" / "step-20"
    folder.mkdir()
    (folder / "scores.json").write_text('{"tasks": {"arc": {"value": "high"}, "x": 3}}')
    assert "arc" in write_report([last]).read_text()


def test_a_label_at_the_edge_stays_inside() -> None:
    chart = Chart(
        title="t",
        description="d",
        curves=[Curve(label="c", points=[(0.0, 1.0), (100.0, 2.0)])],
        boundaries=[Level(label="a long name of a run", value=99.0)],
    )
    place = re.search(r'<text x="([\d.]+)" y="22" text-anchor="(\w+)"', draw(chart))
    assert place is not None
    assert place[2] == "end"
    assert float(place[1]) < 480


def test_labels_of_short_stages_do_not_overlap() -> None:
    names = [
        "mid-training",
        "chat",
        "lima",
        "a name that is longer than half of the whole page" * 2,
    ]
    chart = Chart(
        title="t",
        description="d",
        curves=[Curve(label="c", points=[(0.0, 1.0), (1000.0, 2.0)])],
        boundaries=[Level(label=name, value=980.0 + place) for place, name in enumerate(names)],
    )
    place = r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)" class="label">(.*?)<'
    found = re.findall('boundary"></line>' + place, draw(chart))
    assert [text[:4] for *_, text in found] == ["mid-", "chat", "lima", "a na"]
    boxes = []
    for x, y, anchor, text in found:
        begin = float(x) - (6 * len(text) if anchor == "end" else 0)
        assert 0 < begin < begin + 6 * len(text) < 480
        boxes.append((begin, begin + 6 * len(text), float(y)))
    for n, (begin, end, y) in enumerate(boxes):
        for other in boxes[:n]:
            assert end < other[0] or begin > other[1] or abs(y - other[2]) >= 12


def test_each_stage_has_its_colour_and_the_shortest_is_seen(tmp_path: Path) -> None:
    parent = None
    for place in range(5):
        steps = 3000 if place == 0 else 1 + 29 * (place == 1)
        stage = make_run(tmp_path / f"stage{place}", parent=parent, steps=steps)
        parent = {"path": str(stage.path), "step": steps}
    page = write_report([stage]).read_text()
    drawing = page[page.index("Training loss of every stage") : page.index('class="run"')]
    loss = drawing[: drawing.index("</figure>")]
    assert len(set(re.findall(r'class="line" style="([^"]+)"', loss))) == 5
    assert len(set(re.findall(r'class="key" style="([^"]+)"', loss))) == 5
    assert loss.count('class="dot"') >= 3  # the stages of one step are no line
    assert len({colour_of(place) for place in range(100)}) == 100


def test_the_verb_takes_widths_in_tokens_and_in_steps(
    last: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_verb(["report", str(last.path), "--bins", "1k,2k,10steps,15000steps"])
    page = Path(capsys.readouterr().out.strip()).read_text()
    for told in ("2k tokens", "10 steps", "15k steps"):
        assert f"each point the mean over {told}" in page
    charts = re.findall(r'<script type="application/json">(.*?)</script>', page)
    points = [[len(curve["points"]) for curve in json.loads(chart)] for chart in charts[2:4]]
    assert points == [
        [2, 1, 3],
        [1, 1, 1],
    ]  # the branch's own steps are 21 to 25, the chat's 1 to 30
    first = json.loads(charts[2])[0]["points"][0]
    assert first[2:] == ["550", f"{sum(8.0 / step for step in range(1, 11)) / 10:.3g}"]
    with pytest.raises(ConfigError, match="--bins"):
        run_verb(["report", str(last.path), "--bins", "5stops"])
