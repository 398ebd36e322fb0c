"""The commands of README.md and docs/*.md, and a small world in which they can be run as written.

What a reader replaces is replaced here (a placeholder, a file of theirs), and so is what would take
hours or a network: fewer tokens, a small model, a local file for a public one. PLACES and SMALLER
say which, LEFT_OUT what is only parsed and why; each must still stand in a document.
"""

import contextlib
import gzip
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from foundling.cli.main import run_verb
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.hamlet.documents import document
from foundling.hamlet.village import Village
from tests.parity.lm_eval_scene import TASKS, write_tasks
from tests.unit.eval.small_bundle import write_bundle

ROOT = Path(__file__).parents[2]
LOG = "log.md"
"""Commands of a day that is over, as they were."""
DOCUMENTS = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
DOCUMENTS.remove(f"docs/{LOG}")
DOCUMENTS.append("benchmarks/README.md")
PROGRAMS = ("foundling", "lm_eval", "torchrun", "srun", "python")
PLACES = {
    "TARGET": "run.yaml",
    "RUN": "runs/mine",
    "RUN@STEP": "runs/mine@10",
    "SRC": "runs/mine",
    "DATA": "work/data",
    "DIR": "work/data",
    "-o DIR": "-o out",
    "T": "work/tokenizer",
    "TOKENIZER": "work/tokenizer",
    "TOKEN": "<|think|>",
    "SOURCE": "books.txt",
    "SPEC": "books.txt",
    "TEXT": "mules",
    "TEXT.parquet": "books.parquet",
    "hf://datasets/OWNER/NAME@config:train": "books.parquet",
    "~/Llama-3.2-1B": "models/Llama-3.2-1B",
    "runs/a@2000": "runs/a@20",
    "runs/base@2000": "runs/a@30",
    "runs/a@4000": "runs/b@30",
    "--train.horizon 4000": "--train.horizon 34",
    "--nodes 64": "--nodes 64 --dry-run --run runs/job --data.allow-repeat 10",
    "--tokens 10B": "--tokens 20K",
    "--nproc 8": "--nproc 2",
    "data build fineweb-edu": "data build books.txt --tokenizer work/tokenizer -o data/fineweb-edu",
    "core,lm:mmlu": f"core,lm:{TASKS[0]} --bundle eval_bundle.zip --include-path tasks --limit 4",
    "lm:nine": f"lm:{TASKS[0]},lm:{TASKS[1]} --include-path tasks --limit 4",
    "lm:commonsense": f"lm:{TASKS[0]} --include-path tasks",
    "lm:gsm8k": f"lm:{TASKS[0]} --include-path tasks --limit 4",
    "lm:mine": f"lm:{TASKS[0]} --limit 4",
    "--tasks arc_easy,piqa": "--tasks village_choice",
    "core": "core --bundle eval_bundle.zip",
    "core,bpb,gsm8k": "core,bpb,gsm8k=test.jsonl.gz --bundle eval_bundle.zip",
    "--limit 200": "--limit 2",
    "--limit 500": "--limit 2",
}
"""Words of a document, and what stands in their place."""
SMALLER = {
    "-m benchmarks.data": "--bytes 200000 --rounds 1 --seconds 0.1 --times 2 --only foundling",
    "data build": "--documents 600",
    "tokenizer train": "--bytes 200000",
    "rehearse": "--steps 6",
}
"""What is added to a verb, so that it takes seconds."""
LEFT_OUT = {
    "bench kernels": "a GPU's size; tests/unit/bench runs it small",
    "benchmarks.ladder": "a GPU's size; tests/unit/benchmarks runs it small",
    "benchmarks.train_hf": "a GPU's size; tests/unit/benchmarks runs it small",
    "bench train": "a GPU's size; tests/unit/bench runs it small",
    "foundling serve": "goes on until it is stopped; tests/unit/serve",
    "foundling fetch": "a network; tests/unit/data has a server of its own",
    "lm_eval": "a network; tests/parity runs it on local files",
    "srun": "a cluster; tests/full/slurm.py",
    "torchrun": "ranks; tests/dist",
    "--detach": "goes on after the command; tests/dist",
    "--push": "a network",
    "--engine ray": "a cluster; tests/unit/data/build/test_executor.py",
    "--follow": "waits for another process; tests/unit/train/test_dataloader_follow.py",
    "--nproc 2": "ranks; tests/dist",
    "--parallel.shard 8": "ranks; tests/dist",
    "--probe": "minutes of measuring; tests/unit/profiling/test_plan_check.py",
    "outputs/checkpoint/step-1000": "another program's checkpoint; tests/unit/checkpoint",
    "models/Llama-3.1-8B": "a cluster's run; tests/unit/launch/test_slurm.py",
    "~/Llama-3.2-1B llama": "its licence; tests/parity/test_convert_parity.py",
    "foundling compare": "runs that were scored; tests/unit/eval",
}


def commands(name: str) -> Iterator[str]:
    """The commands of a document in their order, without comments and without options in brackets
    that a synopsis has."""
    inside = False
    for line in (ROOT / name).read_text().replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif (inside or line.startswith("    ")) and line.split()[:1]:
            told = re.split(r"\s{3,}|\s+#\s", line.strip())[0]
            while (bare := re.sub(r"\s*\[[^][]*\]", "", told)) != told:
                told = bare
            for command in told.split("; "):
                if command.split()[:1] and command.split()[0] in PROGRAMS:
                    yield command.replace("...", "").strip()


def words_of(command: str) -> list[str]:
    """A command as it can be run in the world: its words after the program's name."""
    for long, short in sorted(PLACES.items(), key=lambda pair: -len(pair[0])):
        command = re.sub(rf"(?<![\w./@<-]){re.escape(long)}(?![\w./@=,:-])", short, command)
    words = shlex.split(command)[1:]
    for verb, more in SMALLER.items():
        if " ".join(words).startswith(verb) and "--list" not in words:
            words += more.split()
    return words


def why_not(command: str) -> str:
    """Why it is only parsed; empty: it is run."""
    return next((why for part, why in LEFT_OUT.items() if part in command), "")


def make_world(folder: Path, home: Path, tiny: RunConfig) -> None:
    """What a reader has before the first command: texts, chats, tasks and runs of some days, the
    last from a walked demo, `home`."""
    village = Village(1)
    texts = [document(village, 1, index).text.replace("\n", " ") for index in range(900)]
    (folder / "books.txt").write_text("\n\n".join(texts))
    parquet.write_table(pa.table({"text": texts[:200]}), folder / "books.parquet")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[200:400]).encode()
    for name in ("web", "books", "evals"):
        (folder / name).mkdir()
        with pa.CompressedOutputStream(str(folder / name / "a.jsonl.zst"), "zstd") as file:
            file.write(lines)
    (folder / "evals" / "a.jsonl.zst").unlink()
    (folder / "evals" / "a.jsonl").write_bytes(lines[:2000].rpartition(b"\n")[0] + b"\n")
    chats = [
        [
            {"role": "user", "content": f"What is {number} plus {number % 7}?"},
            {"role": "assistant", "content": f"It is {number + number % 7}."},
        ]
        for number in range(600)
    ]
    told = (json.dumps({"messages": chat}) + "\n" for chat in chats)
    (folder / "chats.jsonl").write_text("".join(told))
    asked = {"question": "What is 1 plus 2?", "answer": "3\n#### 3"}
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(json.dumps(asked).encode() + b"\n"))
    write_bundle(folder / "eval_bundle.zip")
    write_tasks(folder / "tasks")
    for name in ("vocab/gpt2", "vocab/llama3"):
        shutil.copytree(home / "tokenizer", folder / name)
    for name, run in {"a": "pretrain", "b": "pretrain", "mine": "finetune"}.items():
        shutil.copytree(home / run, folder / "runs" / name)
    shutil.copytree(home / "finetune", folder / "runs" / "chat")
    own = tiny.replace(data={"sources": {str(home / "text"): 1.0}})
    (folder / "run.yaml").write_text(dump_yaml(own))


def make_workshop(folder: Path, home: Path) -> None:
    """What README's first commands leave, for the documents that begin after them."""
    shutil.copytree(home / "tokenizer", folder / "work" / "tokenizer")
    with contextlib.chdir(folder):
        run_verb(words_of("foundling data build books.txt --tokenizer work/tokenizer -o work/data"))


def make_models(folder: Path, home: Path) -> None:
    """A model from elsewhere, and data in its tokens."""
    run_verb(["convert", str(home / "pretrain"), str(folder / "models/Llama-3.2-1B"), "--to", "hf"])
    shutil.copytree(home / "text", folder / "data" / "llama")
