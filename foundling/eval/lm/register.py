"""Teaching an installed `lm_eval` command our model class.

Harnesses after 0.4.13 read the entry point `lm_eval.models` of every installed package and need
nothing. 0.4.13 looks models up in a table of its own before any code of ours could run, so
`foundling eval lm --register` puts two small files beside the installed packages, and only because
it is asked to: a module that adds one line to that table when it is read, and the `.pth` file that
has python load it. Rejected: a command of ours called `lm_eval` (it would overwrite theirs).
"""

import sysconfig
from pathlib import Path

from foundling.config.errors import ConfigError

MODEL = "foundling.eval.lm.harness:FoundlingLM"
MODULE = "_foundling_lm_eval"
HOOK = f'''"""Adds foundling to lm_eval's models; written by `foundling eval lm --register`.

Delete this file and {MODULE}.pth, or run `foundling eval lm --unregister`, to be rid of it.
"""

import importlib.abc
import importlib.machinery
import sys

TABLE = "lm_eval.models"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        from lm_eval.api.registry import model_registry

        if "foundling" not in model_registry:
            model_registry.register("foundling", target="{MODEL}")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != TABLE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
'''


def register(folder: Path | None = None) -> list[Path]:
    """Write the two files into this python's site-packages (or `folder`)."""
    home = folder or _site_packages()
    files = {home / f"{MODULE}.py": HOOK, home / f"{MODULE}.pth": f"import {MODULE}\n"}
    try:
        # The module first: a .pth without it would complain whenever python starts.
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{home} cannot be written ({error.strerror}); run"
            " `python -m foundling.eval.lm --model foundling ...` in place of lm_eval."
        ) from None
    return list(files)


def unregister(folder: Path | None = None) -> list[Path]:
    """Delete them; what was there is returned."""
    home = folder or _site_packages()
    files = [home / f"{MODULE}.pth", home / f"{MODULE}.py"]
    found = [path for path in files if path.is_file()]
    for path in found:
        path.unlink()
    return found


def _site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))
