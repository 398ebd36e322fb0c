"""The report: one HTML file that opens without a network and tells how a model was raised.

It reads run directories and nothing else, so it can be written while a run goes on, after it, or on
another machine. Rejected: a notebook or a dashboard server (neither can be mailed to someone).
"""

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foundling.config.errors import RunError
from foundling.config.load import differences, flatten
from foundling.config.run import RunConfig
from foundling.report.lineage import LifeStage, reading, stages_of
from foundling.report.markup import (
    CSS,
    JS,
    Format,
    Markup,
    compact,
    date,
    duration,
    in_bytes,
    join,
    percent,
    plain,
    table,
    tag,
)
from foundling.report.run_charts import run_charts, whole_life
from foundling.report.svg_chart import BinWidth
from foundling.runtime.files import refuse_existing, write_text_atomic
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import Line, RunData, is_number, number, numbers_of, read_lineage
from foundling.runtime.versions import __version__


def write_report(
    runs: Sequence[RunDir],
    out: Path | None = None,
    widths: Sequence[BinWidth] = (),
    *,
    force: bool = False,
) -> Path:
    """Write report.html about `runs` and their ancestors; without `out`, into the last run. Any
    other file is overwritten with `force` only. `widths` are those of the bins that the whole
    life's loss is shown in."""
    if not runs:
        raise RunError("a report needs at least one run; give the path of a run directory.")
    path = out or runs[-1].report_path
    if path.is_dir():
        path = path / "report.html"
    if not force and path.resolve() != runs[-1].report_path.resolve():
        refuse_existing(path)
    lineages = [read_lineage(run.require()) for run in runs]
    write_text_atomic(path, render(lineages, widths))
    return path


def render(lineages: Sequence[Sequence[RunData]], widths: Sequence[BinWidth] = ()) -> str:
    """The page about one or more lineages, each oldest run first; the last one leads."""
    lead = lineages[-1]
    subject = lead[-1]
    chapters: dict[Path, RunData] = {
        data.run.path.resolve(): data for lineage in lineages for data in lineage
    }
    body = [
        tag("header", *_masthead(subject, lead), class_="top"),
        tag(
            "main",
            tag("h3", "Lineage"),
            *(lineage_strip(lineage) for lineage in lineages),
            *(whole_life(lineage, widths) for lineage in lineages),
            scores(subject),
            *(_chapter(data, chapters, scored=data is not subject) for data in chapters.values()),
        ),
        _footer(),
        tag("script", Markup(JS)),
    ]
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"{subject.name}: a foundling's report"),
        tag("style", Markup(CSS)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def _masthead(subject: RunData, lineage: Sequence[RunData]) -> list[Markup]:
    facts = [stage_name(subject.stage)]
    if subject.ended is not None:
        verb = "finished" if subject.status == "finished" else "last heard of"
        facts.append(f"{verb} {date(subject.ended)}")
    return [
        tag("p", "foundling: the report of a run", class_="mark"),
        tag("h1", subject.name),
        tag("p", ", ".join(facts) + ". ", status_pill(subject), class_="lead"),
        tiles(lineage),
    ]


def _chapter(data: RunData, chapters: dict[Path, RunData], *, scored: bool) -> Markup:
    parent = data.run.parent()
    known = chapters.get(parent.path.resolve()) if parent else None
    return tag(
        "section",
        tag("h2", f"{stage_name(data.stage)}: {data.name}"),
        run_lead(data),
        run_charts(data),
        scores(data) if scored else EMPTY,
        samples(data),
        reading(data),
        plan(data),
        settings(data, known),
        events(data),
        class_="run",
        id=anchor(data),
    )


def _footer() -> Markup:
    return tag(
        "footer",
        tag(
            "p",
            "Curves are binned where there are more steps than room: the line is the mean of a bin"
            " and the band its least and greatest value, so that no spike is hidden. Tokens are"
            " real input positions, padding left out.",
        ),
        tag("p", f"Written by foundling {__version__} on {date(time.time())}."),
    )


# The parts of the page that are not charts: figures, lineage, samples, plan, settings.

SAMPLE_ROWS = 10
STAGES = {"text": "Pretraining", "chat": "Fine-tuning"}
EMPTY = Markup("")


def stage_name(stage: str) -> str:
    """The stage as a heading."""
    return STAGES.get(stage, stage.capitalize())


def status_pill(data: RunData) -> Markup:
    """The status in its colour."""
    known = data.status if data.status in ("finished", "failed", "running") else ""
    return tag("span", data.status, class_=f"pill {known}".strip())


def tiles(lineage: Sequence[RunData]) -> Markup:
    """The few numbers that say how it went."""
    last, stages = lineage[-1], stages_of(lineage)
    shown = [
        _quiz_tile(last.final),
        _bits_tile(last),
        _tile("tokens read", compact(stages[-1].end), _stages(stages)),
        _tile("parameters", *_parameters(last)),
        _tile("time in steps", duration(sum(run.training_seconds for run in lineage)), ""),
    ]
    return tag("dl", *(tile for tile in shown if tile), class_="tiles")


def _tile(label: str, value: str, more: str) -> Markup:
    if not value:
        return EMPTY
    text = tag("div", more, class_="more") if more else EMPTY
    return tag(
        "div",
        tag("dt", label),
        tag("dd", tag("div", value, class_="value"), text),
        class_="tile",
    )


def _stages(stages: Sequence[LifeStage]) -> str:
    if len(stages) < 2:
        return f"{stages[-1].data.steps:,} steps"
    return " + ".join(compact(stage.end - stage.begin) for stage in stages)


def _quiz_tile(final: Line) -> Markup:
    quiz = final.get("quiz")
    if not isinstance(quiz, Mapping) or not is_number(quiz.get("accuracy")):
        return EMPTY
    error = f"\u00b1 {percent(quiz['stderr'])}, " if is_number(quiz.get("stderr")) else ""
    return _tile("quiz", percent(quiz["accuracy"]), f"{error}{quiz.get('n', '?')} questions")


def _bits_tile(data: RunData) -> Markup:
    """Bits per byte of all held-out text where that was scored, and else of the clocked part."""
    last = (data.evals or [{}])[-1]
    for source, full in ((data.final, "full_"), (last, "full_"), (last, "")):
        bits, floor = number(source, f"{full}bpb"), number(source, f"{full}floor_bpb")
        if bits is None:
            continue
        more = f"on {'all' if full else 'part of the'} held-out text"
        if floor is not None:
            more = f"{bits - floor:+.3f} from the floor of {floor:.3f}, {more}"
        return _tile("bits per byte", f"{bits:.3f}", more)
    return EMPTY


def _parameters(data: RunData) -> tuple[str, str]:
    config = data.config
    shape = f"{config.model.layers} layers, {config.model.dim} wide" if config else ""
    for name, value in numbers_of(data.info.get("plan", {}).get("predicted", {})):
        if name.rpartition(".")[2] in ("parameters", "params", "all") and is_number(value):
            return compact(value), shape
    return "", ""


def lineage_strip(lineage: Sequence[RunData]) -> Markup:
    """Which run the weights came from, step by step."""
    cards = []
    first = lineage[0]
    if first.parent and first.run.parent() is None:
        gone = tag("div", tag("b", first.parent), tag("span", "not found"), class_="gone")
        cards.append(tag("li", gone))
    for run in lineage:
        facts = f"{stage_name(run.stage)}, {run.steps:,} steps, {compact(run.total_tokens)} tokens"
        link = tag("a", tag("b", run.name), tag("span", facts), href=f"#{anchor(run)}")
        cards.append(tag("li", link))
    return tag("ol", *cards, class_="lineage")


def anchor(data: RunData) -> str:
    """The id of a run's section; runs of one name in two places have two."""
    place = zlib.crc32(str(data.run.path.resolve()).encode())
    return f"run-{place:08x}"


def run_lead(data: RunData) -> Markup:
    """One sentence under a run's heading."""
    parts = [f"{data.steps:,} steps over {compact(data.total_tokens)} tokens"]
    if data.training_seconds:
        parts.append(f"{duration(data.training_seconds)} in steps")
    if data.started is not None:
        parts.append(f"begun {date(data.started)}")
    resumed = sum(1 for line in data.events if line.get("event") == "resumed")
    if resumed:
        parts.append(f"resumed {resumed} times" if resumed > 1 else "resumed once")
    parts += [f"{damage}, left out here" for damage in data.damage]
    return tag("p", "; ".join(parts) + ". ", status_pill(data), class_="lead")


def samples(data: RunData) -> Markup:
    """The fixed prompts continued through time, so that one can watch it learn to speak."""
    if not data.samples:
        return EMPTY
    prompts = list(dict.fromkeys(line["prompt"] for line in data.samples))
    said = {(line["step"], line["prompt"]): line["text"] for line in data.samples}
    steps = sorted({step for step, _ in said})
    # A chat model is asked; a text model is handed a beginning.
    dots = "" if data.stage == "chat" else " \u2026"
    head = ["step", *(prompt + dots if prompt else "(no prompt)" for prompt in prompts)]

    def rows(chosen: Sequence[int]) -> list[list[object]]:
        return [[f"{step:,}", *(said.get((step, p), "") for p in prompts)] for step in chosen]

    few = spread(steps, SAMPLE_ROWS)
    caption = "What the model made of its fixed prompts, by step"
    parts = [tag("h3", "Learning to speak"), table(caption, head, rows(few), "text samples")]
    if len(few) < len(steps):
        every = table("Every sample", head, rows(steps), "text samples")
        parts.append(tag("details", tag("summary", f"All {len(steps)} rounds of samples"), every))
    return join(parts)


def spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, the first and the last among them, denser at the start:
    speech comes early and then improves slowly."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    places = {round(last * (index / (most - 1)) ** 1.6) for index in range(most)}
    return [items[place] for place in sorted(places)]


def plan(data: RunData) -> Markup:
    """Predicted and measured figures, and the error of each."""
    stated = data.info.get("plan")
    if not isinstance(stated, Mapping):
        return EMPTY
    predicted = dict(numbers_of(stated.get("predicted", {})))
    measured = dict(numbers_of(stated.get("measured", {})))
    names = list(dict.fromkeys([*predicted, *measured]))
    if not names:
        return EMPTY
    rows = [_plan_row(name, predicted.get(name), measured.get(name)) for name in names]
    head = ["", "predicted", "measured", "error"]
    caption = "Error is measured minus predicted, as a share of the prediction"
    return join([tag("h3", "Predicted against measured"), table(caption, head, rows)])


def _plan_row(name: str, predicted: float | None, measured: float | None) -> list[object]:
    show = unit_format(name)
    error: object = ""
    if predicted is not None and measured is not None:
        if predicted == measured:
            error = tag("span", "exact", class_="good")
        elif predicted:
            error = f"{100 * (measured - predicted) / predicted:+.1f}%"
    return [
        plan_label(name),
        "" if predicted is None else show(predicted),
        "not measured" if measured is None else show(measured),
        error,
    ]


def unit_format(name: str) -> Format:
    """How to show a number, by the unit in its name."""
    last = name.rpartition(".")[2]
    if last.endswith("per_s") or "flops" in last:
        return compact
    if last.endswith(("_s", "seconds")):
        return duration
    if last.endswith("bytes") or last.startswith("memory"):
        return in_bytes
    if last == "mfu" or last.endswith("share"):
        return percent
    return plain


def plan_label(name: str) -> str:
    """horizon.steps as "horizon steps", train_s as "train time"."""
    words = name.replace(".", " ").replace("_", " ").split()
    if words[-1:] == ["s"]:
        words[-1] = "second" if words[-2:-1] == ["per"] else "time"
    return " ".join(words)


def settings(data: RunData, parent: RunData | None) -> Markup:
    """What is set differently from the parent, and all settings in a folded section."""
    if data.config is None:
        return tag("p", f"Settings are not shown: {data.config_problem}", class_="note")
    parts: list[Markup] = []
    if parent is not None and parent.config is not None:
        parts.append(_differences(parent, data, parent.config, data.config))
    rows = [(name, tag("code", _setting(value))) for name, value in flatten(data.config)]
    every = table("The resolved config", ["setting", "value"], rows, "text")
    parts.append(tag("details", tag("summary", "All settings"), every))
    return join(parts)


def _differences(parent: RunData, data: RunData, old: RunConfig, new: RunConfig) -> Markup:
    changes = differences(old, new)
    title = tag("h3", f"What changed since {parent.name}")
    if not changes:
        return join([title, tag("p", "Nothing: every setting is the parent's.")])
    rows = [
        (c.field, tag("code", _setting(c.old), class_="was"), tag("code", _setting(c.new)))
        for c in changes
    ]
    head = ["setting", parent.name, data.name]
    return join([title, table("Settings that differ from the parent run", head, rows, "text")])


def _setting(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "(none)"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "(none)"
    return "(empty)" if value == "" else str(value)


def events(data: RunData) -> Markup:
    """The events of the run, in a folded section."""
    if not data.events:
        return EMPTY
    rows = [
        (
            date(line["time"]) if is_number(line.get("time")) else "",
            line.get("event", ""),
            ", ".join(
                f"{k} {json.dumps(v) if isinstance(v, (Mapping, list)) else v}"
                for k, v in line.items()
                if k not in ("time", "event")
            ),
        )
        for line in data.events
    ]
    caption = "Starts, resumes, failures and changed settings"
    listed = table(caption, ["when", "what", ""], rows, "text")
    return tag("details", tag("summary", f"{len(rows)} events"), listed)


# The final evaluation as tables: the quiz with its sample sizes, bits per byte by kind.

SHARES = (
    ("accuracy", "n", "stderr", "right, of everything asked"),
    ("documents_only", "", "", "right, of facts that stood in documents only"),
    ("sums", "", "", "right, of sums"),
    ("unknown_declined", "", "", "declined, of people who do not exist"),
    ("known_wrongly_declined", "", "", "declined, of facts it could know (lower is better)"),
)
SHOWN_REPLIES = 8


def scores(data: RunData) -> Markup:
    """Everything `foundling eval` found out about a run."""
    return join([_quiz(data.final.get("quiz")), _bits(data.final)])


def _quiz(quiz: object) -> Markup:
    if not isinstance(quiz, Mapping) or not is_number(quiz.get("accuracy")):
        return EMPTY
    rows = [
        _share(label, quiz.get(name), quiz.get(n or f"{name}_n"), quiz.get(e or f"{name}_stderr"))
        for name, n, e, label in SHARES
        if is_number(quiz.get(name))
    ]
    head = ["", "share", "", "questions", "standard error"]
    parts = [
        tag("h3", "The quiz"),
        tag(
            "p",
            "Questions in patterns that no training text holds, answered greedily and graded"
            " against the village's own truth.",
            " This model was never fine-tuned: it was asked in the form of a document, and nobody"
            " taught it to decline."
            if quiz.get("asked") == "as text"
            else "",
        ),
        table("Quiz scores", head, rows),
    ]
    kinds = quiz.get("by_kind")
    if isinstance(kinds, Mapping) and kinds:
        by_kind = [
            _share(kind, score.get("accuracy"), score.get("n"), score.get("stderr"))
            for kind, score in kinds.items()
        ]
        parts.append(
            tag("details", tag("summary", "By kind of question"), table("Right", head, by_kind))
        )
    parts.append(_replies(quiz.get("replies")))
    return join(parts)


def _share(label: str, value: Any, n: Any, stderr: Any) -> list[object]:
    if not is_number(value):
        return [label, "", "", n or 0, ""]
    error = f"\u00b1 {percent(stderr)}" if is_number(stderr) else ""
    bar = _meter(min(max(value, 0.0), 1.0))
    return [label, percent(value), bar, f"{n:,}" if is_number(n) else "", error]


def _meter(share: float, inner: float | None = None) -> Markup:
    """A small bar; it repeats the number, so it is hidden from screen readers."""
    bars = [tag("i", style=f"width:{100 * share:.1f}%")]
    if inner is not None:
        bars.append(tag("i", style=f"width:{100 * inner:.1f}%", class_="low"))
    return tag("span", *bars, class_="meter", aria_hidden="true")


def _replies(replies: object) -> Markup:
    if not isinstance(replies, Sequence) or not replies:
        return EMPTY
    answers = [reply for reply in replies if isinstance(reply, Mapping)]
    right = [reply for reply in answers if reply.get("correct")]
    wrong = [reply for reply in answers if not reply.get("correct")]
    parts = []
    for title, chosen in (("Answered right", right), ("Answered wrong", wrong)):
        if chosen:
            shown = chosen[:SHOWN_REPLIES]
            head = ["question", "reply", "true answer"]
            rows = [_reply(reply) for reply in shown]
            summary = f"{title}: {len(shown)} of {len(chosen)}"
            parts.append(tag("details", tag("summary", summary), table(title, head, rows, "text")))
    return join(parts)


def _reply(reply: Mapping[str, Any]) -> tuple[object, object, object]:
    mark = "good" if reply.get("correct") else "bad"
    said = tag("span", reply.get("reply") or "(nothing)", class_=mark)
    return reply.get("prompt", ""), said, reply.get("answer", "")


def _bits(final: Line) -> Markup:
    kinds, every = final.get("by_kind"), number(final, "full_bpb")
    if every is None or not isinstance(kinds, Mapping):
        return EMPTY
    most = max([*(number(score, "bpb") or 0.0 for score in kinds.values()), every])
    rows = [_kind(kind, score, most) for kind, score in kinds.items()]
    head = ["kind of document", "bits per byte", "", "floor", "above the floor", "text"]
    note, caption = "Bits that the model needs for each byte of text it has never seen.", ""
    floor = number(final, "full_floor_bpb")
    total = {"bpb": every, "floor_bpb": floor, "bytes": final.get("bytes")}
    if floor is not None:
        note += " The floor is what the text's own randomness costs: no model could do better."
        caption = "; the bar's inner part is the floor"
    return join(
        [
            tag("h3", "Held-out text"),
            tag("p", note),
            table(
                f"Held-out bits per byte{caption}",
                head,
                rows,
                total=_kind("everything", total, most),
            ),
        ]
    )


def _kind(label: str, score: Mapping[str, Any], most: float) -> list[object]:
    bits, floor, size = (number(score, name) for name in ("bpb", "floor_bpb", "bytes"))
    if bits is None:
        return [label, "", "", "", "", ""]
    return [
        label,
        f"{bits:.3f}",
        _meter(bits / most, None if floor is None else floor / most),
        "" if floor is None else f"{floor:.3f}",
        "" if floor is None else f"{bits - floor:+.3f}",
        "" if size is None else f"{compact(size)} bytes",
    ]
