"""Named data sets, and `hf://` names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from foundling.config.errors import DataError
from foundling.data.readers.source import ReadOptions


def is_remote(spec: str) -> bool:
    """Whether `spec` is an address or the name of a recipe."""
    return "://" in spec or recipe_of(spec) is not None


# How a repository of the hub is named.
#
# hf://datasets/OWNER/NAME[@config][:split][#revision]
# hf://datasets/OWNER/NAME/path/of/files-*.parquet[#revision]
# hf://OWNER/NAME[#revision]                              a model, for its tokenizer
#
# `@` is the config here and not the revision, because that is what people choose every day.

PREFIX = "hf://"
FORM = "hf://datasets/OWNER/NAME[@config][:split][#revision]"
_WORD = re.compile(r"(?!.*(--|\.\.))\w([\w.-]{0,94}\w)?(?<!\.git)")
"""What the hub accepts; its library refuses another with an error of its own."""


@dataclass(frozen=True, kw_only=True)
class HubUri:
    """What part of which repository, at which revision."""

    repo: str
    """OWNER/NAME."""
    kind: Literal["dataset", "model"] = "dataset"
    config: str = ""
    """Part of a data set; empty: its default."""
    split: str = ""
    """Empty: train, or the only one."""
    path: str = ""
    """Files by name or pattern, instead of a config and a split."""
    revision: str = ""
    """Branch, tag or commit; empty: main."""

    @property
    def name(self) -> str:
        """The repository without its owner."""
        return self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "dataset" else ""
        text = f"{PREFIX}{kind}{self.repo}"
        for mark, value in (("/", self.path), ("@", self.config), (":", self.split)):
            text += mark + value if value else ""
        return text + (f"#{self.revision}" if self.revision else "")


def parse_uri(text: str) -> HubUri:
    """Read a name, or say in one sentence how it is written."""
    if not text.startswith(PREFIX):
        raise DataError(f"{text} does not begin with {PREFIX}; write {FORM}.")
    rest, _, revision = text[len(PREFIX) :].partition("#")
    is_data = rest.startswith("datasets/")
    rest = rest.removeprefix("datasets/").removeprefix("models/")
    owner, _, rest = rest.partition("/")
    name, slash, path = rest.partition("/")
    if slash and ("@" in name or ":" in name):
        raise DataError(f"{text} has a config or split and a path; give one of them ({FORM}).")
    name, _, split = name.partition(":")
    name, _, config = name.partition("@")
    if not (_WORD.fullmatch(owner) and _WORD.fullmatch(name)):
        raise DataError(f"{text} names no repository; write {FORM}.")
    if not is_data and (config or split or path):
        raise DataError(f"{text} is a model with a config, split or path; data is {FORM}.")
    return HubUri(
        repo=f"{owner}/{name}",
        kind="dataset" if is_data else "model",
        config=config,
        split=split,
        path=path.strip("/"),
        revision=revision,
    )


# Named data sets: what `foundling data build NAME` reads, with the settings that fit it.
#
# A recipe is data. Sizes are what the authors state and are only used for estimates; what a build
# reads is counted by the build. A name takes the same endings as an address: NAME@config,
# NAME:split, NAME#revision.


_TEXT = ReadOptions(text="text", schema="text")
_MESSAGES = ReadOptions(text="messages", schema="messages")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where a data set lives and how its rows become documents or conversations."""

    name: str
    uri: str
    about: str
    """What it is, in a few words."""
    size: str
    """How large, as its authors say."""
    licence: str
    kind: Literal["text", "chat"] = "text"
    options: ReadOptions = _TEXT
    tokens_per_file: float = 0.0
    """About; 0: estimated from the bytes."""
    blobs: bool = False
    """Rows hold ids of files in Software Heritage's archive, which are fetched one by one."""


_ODC = "ODC-By 1.0, and the terms of Common Crawl"
_ZYDA = "hf://datasets/Zyphra/Zyda-2"

_ALL = (
    Recipe(
        name="fineweb-edu",
        uri="hf://datasets/HuggingFaceFW/fineweb-edu@sample-100BT",
        about="educational web pages, a random sample; also @sample-10BT, @sample-350BT, @default",
        size="100B tokens, 140 files",
        licence=_ODC,
        tokens_per_file=0.7e9,
    ),
    Recipe(
        name="fineweb-edu-100b",
        uri="hf://datasets/karpathy/fineweb-edu-100b-shuffle",
        about="the same pages shuffled into small files, shard_00000 to shard_01822",
        size="100B tokens, 1,823 files of 56M",
        licence=_ODC,
        tokens_per_file=56e6,
    ),
    Recipe(
        name="zyda2-dclm",
        uri=f"{_ZYDA}@dclm_crossdeduped",
        about="DCLM without what the other parts hold",
        size="3.3T tokens",
        licence="ODC-By 1.0",
    ),
    Recipe(
        name="zyda2-fwe",
        uri=f"{_ZYDA}@fwe3",
        about="FineWeb-Edu of score 3, the part of Zyda-2",
        size="1.3T tokens",
        licence="ODC-By 1.0",
    ),
    Recipe(
        name="zyda2-dolma",
        uri=f"{_ZYDA}@dolma-cc_crossdeduped-filtered",
        about="the Common Crawl part of Dolma, filtered",
        size="0.24T tokens",
        licence="ODC-By 1.0",
    ),
    Recipe(
        name="zyda2-zyda",
        uri=f"{_ZYDA}@zyda_crossdeduped-filtered",
        about="the first Zyda, filtered",
        size="0.16T tokens",
        licence="ODC-By 1.0",
    ),
    Recipe(
        name="stack-v2",
        uri="hf://datasets/bigcode/the-stack-v2-train-smol-ids",
        about="source code of 17 languages; ids here, files from Software Heritage's archive",
        size="ids of repositories",
        licence="gated; each file has its own; in bulk by agreement with Software Heritage",
        options=ReadOptions(text="content", schema="text"),
        blobs=True,
    ),
    Recipe(
        name="finemath-3plus",
        uri="hf://datasets/HuggingFaceTB/finemath@finemath-3plus",
        about="web pages about mathematics",
        size="34B tokens, 128 files",
        licence=_ODC,
        tokens_per_file=0.27e9,
    ),
    Recipe(
        name="smoltalk",
        uri="hf://datasets/HuggingFaceTB/smoltalk@all:train",
        kind="chat",
        about="a million synthetic conversations of many kinds",
        size="1.04M conversations",
        licence="Apache 2.0",
        options=_MESSAGES,
    ),
    Recipe(
        name="ultrachat-sft",
        uri="hf://datasets/HuggingFaceH4/ultrachat_200k:train_sft",
        kind="chat",
        about="filtered conversations, the part for fine-tuning",
        size="208k conversations",
        licence="MIT",
        options=_MESSAGES,
    ),
    Recipe(
        name="ultrachat-gen",
        uri="hf://datasets/HuggingFaceH4/ultrachat_200k:train_gen",
        kind="chat",
        about="filtered conversations, the part for generation",
        size="256k conversations",
        licence="MIT",
        options=_MESSAGES,
    ),
    Recipe(
        name="openthoughts",
        uri="hf://datasets/open-thoughts/OpenThoughts-114k@default:train",
        kind="chat",
        about="questions with long thoughts and a solution, behind a system message",
        size="114k conversations",
        licence="Apache 2.0",
        options=ReadOptions(text="conversations", schema="sharegpt"),
    ),
    Recipe(
        name="lima",
        uri="hf://datasets/GAIR/lima:train",
        kind="chat",
        about="a thousand chosen questions and answers",
        size="1,030 conversations, 0.7M tokens",
        licence="gated; CC BY-NC-SA or stricter: not for sale",
        options=ReadOptions(text="conversations", schema="sharegpt"),
    ),
)
RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
RECIPE_TOKENIZER = "hf://openai-community/gpt2"
"""What a recipe is tokenised with unless told otherwise: the vocabulary most accounts use."""


def recipe_of(spec: str) -> tuple[Recipe, HubUri] | None:
    """The recipe that `spec` names and the address it means; None if it names none."""
    name = spec
    for mark in "#:@":
        name = name.partition(mark)[0]
    recipe = RECIPES.get(name)
    if recipe is None:
        return None
    uri = parse_uri(recipe.uri)
    rest, _, revision = spec[len(name) :].partition("#")
    rest, _, split = rest.partition(":")
    config = rest.removeprefix("@")
    if config and config != uri.config:
        # Another part of the data set has its own splits and its own size.
        uri = replace(uri, config=config, split="")
        recipe = replace(recipe, tokens_per_file=0.0)
    return recipe, replace(uri, split=split or uri.split, revision=revision)


def merged(recipe: Recipe, options: ReadOptions) -> ReadOptions:
    """The recipe's settings, where the user did not say otherwise; filters of both hold."""
    own = recipe.options
    said = options.changed()
    if "template" in said:
        own = replace(own, text="", schema="text")
    # Whether it is streamed decides no row, so it is not among what `changed` tells.
    return replace(own, **{**said, "where": own.where + options.where}, stream=options.stream)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Shares by rows, as an account published them."""

    name: str
    about: str
    shares: Mapping[str, float]


MIXTURES: Mapping[str, Mixture] = {
    mixture.name: mixture
    for mixture in (
        Mixture(
            name="web-code-math",
            about="continued pretraining of an 8B model on web pages, code and mathematics",
            shares={
                "zyda2-dclm": 0.40,
                "zyda2-fwe": 0.44,
                "zyda2-dolma": 0.03,
                "zyda2-zyda": 0.02,
                "stack-v2": 0.10,
                "finemath-3plus": 0.01,
            },
        ),
        Mixture(
            name="midtrain",
            about="mid-training of a 460M model: text and conversations, by rows",
            shares={
                "fineweb-edu-100b": 0.30,
                "smoltalk": 0.4844,
                "ultrachat-gen": 0.119,
                "ultrachat-sft": 0.0966,
            },
        ),
        Mixture(
            name="sft",
            about="fine-tuning of the same model, by rows; LIMA for three epochs comes after it",
            shares={"smoltalk": 0.65, "ultrachat-gen": 0.20, "ultrachat-sft": 0.15},
        ),
    )
}


def mixture_text(name: str, folder: str = "data") -> str:
    """A mixture as a config says it, with each data set built in FOLDER/NAME."""
    if name not in MIXTURES:
        raise DataError(f"{name} is no mixture; there are {', '.join(MIXTURES)}.")
    mixture = MIXTURES[name]
    lines = [f"# {mixture.about}", "data:", "  weights_by: rows", "  sources:"]
    lines += [f"    {folder}/{source}: {share}" for source, share in mixture.shares.items()]
    return "\n".join(lines) + "\n"
