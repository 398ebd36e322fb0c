"""The final evaluation as tables: the quiz with its sample sizes, bits per byte by kind."""

from collections.abc import Mapping, Sequence
from typing import Any

from foundling.report.markup import Markup, join, table, tag
from foundling.report.numbers import compact, percent
from foundling.report.read import Line, RunData, is_number, number

SHARES = (
    ("accuracy", "n", "stderr", "right, of everything asked"),
    ("documents_only", "", "", "right, of facts that stood in documents only"),
    ("sums", "", "", "right, of sums"),
    ("unknown_declined", "", "", "declined, of people who do not exist"),
    ("known_wrongly_declined", "", "", "declined, of facts it could know (lower is better)"),
)
SHOWN_REPLIES = 8
EMPTY = Markup("")


def scores(data: RunData) -> Markup:
    """Everything `foundling eval` found out about a run."""
    parts = [_quiz(data.final.get("quiz")), _bits(data.final)]
    return join(part for part in parts if part)


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
    return [label, percent(value), meter(value), f"{n:,}" if is_number(n) else "", error]


def meter(share: float, class_: str | None = None) -> Markup:
    """A small bar; decoration beside the number, so hidden from screen readers."""
    width = f"width:{100 * min(max(share, 0.0), 1.0):.1f}%"
    return tag("span", tag("i", style=width, class_=class_), class_="meter", aria_hidden="true")


def _replies(replies: object) -> Markup:
    if not isinstance(replies, Sequence) or not replies:
        return EMPTY
    told = [reply for reply in replies if isinstance(reply, Mapping)]
    right = [reply for reply in told if reply.get("correct")]
    wrong = [reply for reply in told if not reply.get("correct")]
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
    bars = [tag("i", style=f"width:{100 * bits / most:.1f}%")]
    if floor is not None:
        bars.append(tag("i", style=f"width:{100 * floor / most:.1f}%", class_="low"))
    return [
        label,
        f"{bits:.3f}",
        tag("span", *bars, class_="meter", aria_hidden="true"),
        "" if floor is None else f"{floor:.3f}",
        "" if floor is None else f"{bits - floor:+.3f}",
        "" if size is None else f"{compact(size)} bytes",
    ]
