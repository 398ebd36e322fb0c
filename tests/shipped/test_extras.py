"""The core stands alone: with every extra blocked, a model trains two steps."""

import subprocess
import sys
from pathlib import Path

from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig

EXTRAS = (
    *("transformers", "datasets", "datatrove", "torchao", "liger_kernel", "lm_eval"),
    *("wandb", "ray", "accelerate", "sentencepiece", "cudnn", "flash_attn"),
)

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
sys.argv = ["foundling", "train", {config!r}, "--run", {run!r}]
from foundling.cli.main import main
main()
"""


def test_the_core_trains_without_any_extra(tiny: RunConfig, tmp_path: Path) -> None:
    config = tiny.replace(train={"horizon": 2})
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config))
    code = BLOCKED.format(extras=EXTRAS, config=str(file), run=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
