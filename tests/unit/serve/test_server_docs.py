"""The three commands of docs/serve.md, as they are written there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT, Family, served

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "serve.md").read_text(), re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_newcomer_serves_and_asks_in_three_commands(family: Family, tmp_path: Path) -> None:
    (_, serving), (shell, curl), (python, client) = BLOCKS
    assert (shell, python) == ("bash", "python")
    program, verb, model = shlex.split(serving)
    assert (program, verb) == ("foundling", "serve")
    shutil.copytree(family.chat, tmp_path / model)
    with served(tmp_path / model) as running:
        for words, text in ((["bash", "-c"], curl), ([sys.executable, "-c"], client)):
            assert ADDRESS in text
            done = subprocess.run(
                [*words, text.replace(ADDRESS, running.url)],
                capture_output=True,
                text=True,
                timeout=60,
                env={**os.environ, "NO_PROXY": "*"},
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip(), done.stderr
            if shell in words:
                assert '"chat.completion"' in done.stdout
