"""Trust and bench at full size: all 500 damaged files, and data beside other libraries."""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT / "tests" / "unit" / "data"))
from damage import ALL, cases, failures, judged  # noqa: E402
from damage_child import make_home  # noqa: E402


def damage() -> dict[str, Any]:
    """500 damaged files end in quarantine, in one sentence or without effect."""
    with tempfile.TemporaryDirectory() as home:
        make_home(Path(home))
        outcomes = judged(Path(home), [case.name for case in cases()])
    assert not failures(outcomes), failures(outcomes)
    assert len(outcomes) == ALL
    return {"files": ALL, "outcomes": dict(Counter(outcomes.values()).most_common())}


def bench_data() -> dict[str, Any]:
    """The real corpus: ahead in build and resume, ahead or within 10% in load."""
    corpus = SHARED / "corpus"
    assert corpus.is_dir(), f"{SHARED} holds no corpus"
    command = [sys.executable, "-m", "benchmarks.data", "--json"]
    options = ["--source", str(corpus), "--bytes", "100M", "--rounds", "3"]
    tokenizer = ["--tokenizer", str(SHARED / "tokenizers" / "gpt2")]
    done = subprocess.run(
        [*command, *options, *tokenizer], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    measured = [name for name, found in result["contenders"].items() if "absent" not in found]
    failed = {
        name: found["failed"] for name, found in result["contenders"].items() if "failed" in found
    }
    assert not failed, failed
    missed = {what: bar for what, bar in result["bars"].items() if not bar["met"]}
    assert not missed, missed
    assert len(measured) >= 2, "nobody to compare with: install benchmarks/requirements.txt"
    return result
