"""The quiz about a village put to a model, answered greedily and graded.

Greedy, so that a score is a property of the weights alone and needs no seed. Every share comes
with the number of questions behind it and the binomial standard error, because 95% of 20 questions
and 95% of 2,000 are different news.
"""

from collections.abc import Callable, Iterable
from typing import Any

from foundling.eval.task_scoring import reply_request
from foundling.generate.engine import Engine
from foundling.tasks.base import Example, Score, Task
from foundling.tasks.hamlet_quiz import FACTS, SUMS, UNKNOWN
from foundling.tokenizer.tokenizer import Tokenizer

REPLY_TOKENS = 48
SHARES: dict[str, tuple[Callable[[Example], bool], str]] = {
    "documents_only": (lambda example: example.documents_only, "correct"),
    "sums": (lambda example: example.group == SUMS, "correct"),
    "unknown_declined": (lambda example: example.group == UNKNOWN, "declined"),
    "known_wrongly_declined": (lambda example: example.group == FACTS, "declined"),
}
"""Of which examples a share is, and what is counted: facts that stand in pretraining documents and
in no conversation, sums, people who do not exist, and facts (declined: the lower the better)."""


def run_quiz(
    engine: Engine, tokenizer: Tokenizer, task: Task, *, as_text: bool = False
) -> dict[str, Any]:
    """Ask every example of `task`: each share under its name, with `_n` and `_stderr` beside it; a
    share of nothing is None. `as_text` asks a model that was never fine-tuned, in the form its
    documents have."""
    examples = task.examples()
    requests = [
        reply_request(engine, tokenizer, _prompt(tokenizer, example, as_text), REPLY_TOKENS)
        for example in examples
    ]
    by_place: dict[int, dict[str, Any]] = {}
    for place, completion in engine.completions(requests):
        text = tokenizer.decode(completion.ids, skip_special=True)
        if as_text:  # the next line is the next question
            text = text.partition("\n")[0]
        text, example = text.strip(), examples[place]
        grade = task.grade(example, text)
        by_place[place] = {
            "prompt": example.messages[-1]["content"],
            "answer": example.answer,
            "reply": text,
            "kind": example.kind,
            "documents_only": example.documents_only,
            "correct": grade.correct,
            "declined": grade.declined,
            "finished": completion.finish == "stop",
        }
    replies = [by_place[place] for place in range(len(examples))]
    overall = _share(reply["correct"] for reply in replies)
    if overall is None:
        raise ValueError(f"{task.name} has no examples")
    found: dict[str, Any] = {"name": task.name, **_accuracy(overall)}
    for name, (is_meant, counted) in SHARES.items():
        asked = zip(examples, replies, strict=True)
        share = _share(reply[counted] for example, reply in asked if is_meant(example))
        found[name] = share.value if share else None
        found[f"{name}_n"] = share.n if share else 0
        found[f"{name}_stderr"] = share.stderr if share else None
    by_kind = {
        kind: _share(reply["correct"] for reply in replies if reply["kind"] == kind)
        for kind in sorted({example.kind for example in examples})
    }
    found["by_kind"] = {kind: _accuracy(share) for kind, share in by_kind.items() if share}
    return {**found, "replies": replies}


def _prompt(tokenizer: Tokenizer, example: Example, as_text: bool) -> list[int]:
    if not as_text:
        return tokenizer.prompt(example.messages)
    question = example.messages[-1]["content"]
    return [tokenizer.bos_id, *tokenizer.encode(f"Question: {question} Answer:")]


def _share(outcomes: Iterable[bool]) -> Score | None:
    each = list(outcomes)
    return Score.of_share("accuracy", sum(each), len(each))


def _accuracy(share: Score) -> dict[str, Any]:
    return {"accuracy": share.value, "n": share.n, "stderr": share.stderr}
