"""Whether the data is there as its manifests say: what `train` would refuse, told by the plan.

Sizes and names only; hashes are `data verify`'s and the first step's. A plan warns where train
refuses, because the data can still be repaired before the run.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from foundling.config.errors import UserError
from foundling.config.manifest import Manifest, ShardInfo, shard_problem
from foundling.config.sections import RunConfig

TOKENIZER_FOLDER = "tokenizer"
QUICK_BYTES = 1 << 20
"""A larger tokenizer takes longer to read than a whole plan may: its fingerprint is train's."""
Fingerprint = Callable[[Path], str]
"""The fingerprint of a tokenizer's folder: given from above, because it is another room's."""


def whole_shards(folder: str, manifest: Manifest) -> list[ShardInfo]:
    """Training shards that are there at their full size."""
    return [info for info in manifest.train if not shard_problem(Path(folder), info)]


def refusals(
    config: RunConfig, manifests: Mapping[str, Manifest], fingerprint: Fingerprint | None
) -> list[str]:
    """What train will say about the data, a sentence each."""
    if not manifests:
        return []
    found = [
        *_kinds(config, manifests),
        *_unfinished(config, manifests),
        *_shards(manifests),
        *_tokenizer(config, manifests, fingerprint),
    ]
    return [f"train will refuse: {sentence}" for sentence in found]


def _kinds(config: RunConfig, manifests: Mapping[str, Manifest]) -> Iterator[str]:
    kinds = {manifest.kind for manifest in manifests.values()}
    if config.train.stage == "finetune" and "chat" not in kinds:
        yield "train.stage finetune needs a data set of conversations in data.sources."
    if config.train.stage == "pretrain" and "chat" in kinds:
        yield "data.sources has conversations, which need train.stage finetune."


def _unfinished(config: RunConfig, manifests: Mapping[str, Manifest]) -> Iterator[str]:
    for name, manifest in manifests.items():
        if not (manifest.complete or config.data.follow):
            yield f"{name} is still being built; wait for its build, or set data.follow."


def _shards(manifests: Mapping[str, Manifest]) -> Iterator[str]:
    """The first of each source that is not whole, and how many more."""
    for name, manifest in manifests.items():
        problems = (shard_problem(Path(name), info) for info in (*manifest.train, *manifest.val))
        wrong = [sentence for sentence in problems if sentence]
        if wrong:
            more = f" ({len(wrong) - 1} more are not whole either)" if wrong[1:] else ""
            yield wrong[0].removesuffix(".") + more + "."


def _tokenizer(
    config: RunConfig, manifests: Mapping[str, Manifest], fingerprint: Fingerprint | None
) -> Iterator[str]:
    """Every source must have been built with the one tokenizer that train will load."""
    folder = Path(config.tokenizer.path or Path(next(iter(manifests))) / TOKENIZER_FOLDER)
    if not folder.exists():
        yield f"{folder} is missing, the tokenizer of the data; copy it back or build again."
        return
    wanted = next(iter(manifests.values())).tokenizer
    if fingerprint is not None and _bytes_in(folder) <= QUICK_BYTES:
        try:
            wanted = fingerprint(folder)
        except UserError as error:
            yield str(error)
            return
    for name, manifest in manifests.items():
        if manifest.tokenizer != wanted:
            yield (
                f"{name} was built with tokenizer {manifest.tokenizer[:12]} and {folder} is"
                f" {wanted[:12]}; build it again or set tokenizer.path."
            )


def _bytes_in(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
