"""Five small tasks in local files, a model, and the same exported."""

import json
from pathlib import Path
from typing import Any

from foundling.checkpoint.convert.convert import convert
from foundling.config.run import RunConfig
from foundling.hamlet.documents import document
from foundling.hamlet.quiz import quiz
from foundling.hamlet.village import Village
from foundling.runtime.run_dir import RunDir

VILLAGE = Village(1)
ASKED = 12

CHOICES = """
task: village_choice
output_type: multiple_choice
doc_to_text: "Question: {{question}} Answer:"
doc_to_target: label
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
SHOTS = (
    CHOICES.replace("village_choice", "village_shots")
    + """
num_fewshot: 4
fewshot_split: train
fewshot_config: {sampler: first_n}
"""
)
LAST_WORD = """
task: village_word
output_type: loglikelihood
doc_to_text: "{{text.rsplit(' ', 1)[0]}}"
doc_to_target: "{{' ' + text.rsplit(' ', 1)[1]}}"
metric_list: [{metric: acc}, {metric: perplexity}]
"""
ROLLING = """
task: village_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
"""
WRITTEN = """
task: village_written
output_type: generate_until
doc_to_text: "Question: {{question}} Answer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TASKS = ("village_choice", "village_shots", "village_word", "village_text", "village_written")


def write_tasks(folder: Path) -> Path:
    """The tasks as the harness reads them with --include_path."""
    data = folder / "data"
    data.mkdir(parents=True)
    questions = quiz(VILLAGE, 3, 60)
    answers = sorted({question.answer for question in questions})
    asked = []
    for number, question in enumerate(questions[: ASKED + 8]):
        wrong = [answer for answer in answers if answer != question.answer][number : number + 3]
        choices = [*wrong[: number % 4], question.answer, *wrong[number % 4 :]]
        asked.append(
            {
                "question": question.prompt,
                "answer": question.answer,
                "choices": [" " + choice for choice in choices],
                "label": choices.index(question.answer),
            }
        )
    texts = [{"text": document(VILLAGE, 1, 900 + n, "val").text.strip()} for n in range(ASKED)]
    _write_lines(data / "train.jsonl", asked[ASKED:])
    _write_lines(data / "asked.jsonl", asked[:ASKED])
    _write_lines(data / "texts.jsonl", texts)
    for text, file in ((CHOICES, "asked"), (SHOTS, "asked"), (WRITTEN, "asked")):
        _write_task(folder, text, data, file)
    for text in (LAST_WORD, ROLLING):
        _write_task(folder, text, data, "texts")
    return folder


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_task(folder: Path, text: str, data: Path, file: str) -> None:
    files = {"train": str(data / "train.jsonl"), "test": str(data / f"{file}.jsonl")}
    if file == "texts":
        del files["train"]
    split = "training_split: train\n" if "train" in files else ""
    name = text.split("task: ")[1].split("\n")[0]
    head = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {json.dumps(files)}}}\n"
        f"test_split: test\n{split}metadata: {{version: 1}}\n"
    )
    (folder / f"{name}.yaml").write_text(head + text.lstrip())


def train_run(config: RunConfig, folder: Path) -> Path:
    """Two steps from loud random weights: a model with opinions, which no tie decides."""
    from foundling.train.loop import train

    loud = config.model.replace(init={"std": 1.0, "head_std": 0.5}, tie_embeddings=False)
    short = config.train.replace(horizon=2, seq_len=128)
    train(config.replace(model=loud, train=short), RunDir(folder))
    return folder


def export(run: Path, folder: Path) -> Path:
    """The run as `foundling convert` hands it to transformers."""
    convert(run, folder, "hf")
    return folder
