"""One quiz put twice: to a run by our own engine, and to its export by transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.checkpoint.bundle import load_bundle
from foundling.generate.engine import Engine
from foundling.generate.request import Request
from foundling.tasks.hamlet_quiz import HamletQuiz

LONGEST = 48


@dataclass
class Answers:
    """How many of the quiz's replies were the same, token for token, and how many right."""

    questions: int = 0
    same: int = 0
    right: int = 0


def ask_both(run: Path, exported: Path, questions: int) -> Answers:
    """Greedy replies to the quiz's questions, in chats that each side's own template writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bundle = load_bundle(run)
    theirs: Any = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    engine = Engine(bundle.model, next(bundle.model.parameters()).device)
    task, stops, found = HamletQuiz(1, 0, questions), bundle.tokenizer.stop_ids, Answers()
    for example in task.examples():
        chat = list(example.messages)
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        given = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        prompt = bundle.tokenizer.prompt(example.messages)
        assert given["input_ids"][0].tolist() == prompt
        reply = theirs.generate(**given, max_new_tokens=LONGEST)[0, len(prompt) :].tolist()
        request = Request(prompt=prompt, max_tokens=LONGEST, stop_ids=frozenset(stops))
        [ours] = engine.complete([request])
        found.questions += 1
        found.same += [id for id in reply if id not in stops] == ours.ids
        found.right += task.grade(
            example, tokenizer.decode(reply, skip_special_tokens=True)
        ).correct
    return found
