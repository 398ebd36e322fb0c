"""What the doctor is asked to look at, in a form that can be handed to a child process."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from foundling.config.resolve import dump_yaml, load_run_config
from foundling.config.sections import RunConfig

LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question to the doctor."""

    config: str = ""
    """The resolved config as YAML; empty: only the machine is looked at."""
    run: str = ""
    """Run directory, which need not exist; empty: none is known."""
    device: str = "auto"
    dtype: str = "auto"
    local_rank: int = 0
    neighbours: int = 1
    """Processes of the job on this machine."""
    thorough: bool = False
    """Hash every shard and every checkpoint."""
    is_main: bool = True
    """Whether this process looks at what all nodes share."""
    limit_s: float = LIMIT_S
    """Seconds for each check that may hang."""
    skip: tuple[str, ...] = ()
    """What a child is not to try again, because the one before died of it."""
    scratch: str = ""
    """A folder to write to; empty: the run's."""

    def run_config(self) -> RunConfig | None:
        """The target's config, if there is a target."""
        if not self.config:
            return None
        import tempfile

        with tempfile.TemporaryDirectory(prefix="foundling-doctor-") as folder:
            file = Path(folder) / "config.yaml"
            file.write_text(self.config)
            return load_run_config(file)

    def without(self, *done: str) -> "Asked":
        """The same question but for what is done."""
        return replace(self, skip=(*self.skip, *done))

    def to_json(self) -> str:
        """For a child's standard input."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Asked":
        """The inverse of to_json."""
        tree = json.loads(text)
        return cls(**{**tree, "skip": tuple(tree["skip"])})


def asked_about(config: RunConfig | None, run: Path | None = None, **more: object) -> Asked:
    """A question about a target, or about the machine alone."""
    train = config.train if config else None
    fields = {
        "config": dump_yaml(config) if config else "",
        "run": str(run) if run else "",
        "device": train.device if train else "auto",
        "dtype": train.dtype if train else "auto",
        **more,
    }
    return Asked(**fields)  # type: ignore[arg-type]
