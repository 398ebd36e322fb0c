"""The report: one HTML file that opens without a network and tells how a model was raised.

It reads run directories and nothing else, so it can be written while a run goes on, after it, or on
another machine. Rejected: a notebook or a dashboard server (neither can be mailed to someone).
"""

import time
from collections.abc import Sequence
from pathlib import Path

import foundling
from foundling.config import RunError
from foundling.report import sections
from foundling.report.curves import BinWidth
from foundling.report.eaten import reading
from foundling.report.figures import run_charts
from foundling.report.life_charts import whole_life
from foundling.report.markup import Markup, tag
from foundling.report.numbers import date
from foundling.report.read import RunData, read_lineage
from foundling.report.scores import scores
from foundling.report.style import CSS, JS
from foundling.runtime.files import refuse_existing, write_text_atomic
from foundling.runtime.rundir import RunDir


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
            *(sections.lineage_strip(lineage) for lineage in lineages),
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
    facts = [sections.stage_name(subject.stage)]
    if subject.ended is not None:
        verb = "finished" if subject.status == "finished" else "last heard of"
        facts.append(f"{verb} {date(subject.ended)}")
    return [
        tag("p", "foundling: the report of a run", class_="mark"),
        tag("h1", subject.name),
        tag("p", ", ".join(facts) + ". ", sections.status_pill(subject), class_="lead"),
        sections.tiles(lineage),
    ]


def _chapter(data: RunData, chapters: dict[Path, RunData], *, scored: bool) -> Markup:
    parent = data.run.parent()
    known = chapters.get(parent.path.resolve()) if parent else None
    return tag(
        "section",
        tag("h2", f"{sections.stage_name(data.stage)}: {data.name}"),
        sections.run_lead(data),
        run_charts(data),
        scores(data) if scored else Markup(""),
        sections.samples(data),
        reading(data),
        sections.plan(data),
        sections.settings(data, known),
        sections.events(data),
        class_="run",
        id=sections.anchor(data),
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
        tag("p", f"Written by foundling {foundling.__version__} on {date(time.time())}."),
    )
