"""Data that lives elsewhere: repositories of the hub, other addresses, and recipes with a name.

    hf://datasets/OWNER/NAME[@config][:split][#revision]    also NAME/path/of/files-*.parquet
    https://..., s3://..., gs://...                         a file; where stores list, a pattern
    fineweb-edu, smoltalk, ...                              `foundling data recipes` lists them

Files are fetched into the hub's own cache, compared with the hub's checksums, and found there again
without network.
"""

from foundling.config.errors import DataError
from foundling.data.hub.client import Hub
from foundling.data.hub.recipes import MIXTURES, RECIPES, Mixture, Recipe, mixture_text, recipe_of
from foundling.data.hub.uri import PREFIX, HubUri, parse_uri
from foundling.data.sources.base import Source
from foundling.data.sources.options import ReadOptions

__all__ = [
    "MIXTURES",
    "RECIPES",
    "Hub",
    "HubUri",
    "Mixture",
    "Recipe",
    "is_remote",
    "mixture_text",
    "open_remote",
    "parse_uri",
    "recipe_of",
]


def is_remote(spec: str) -> bool:
    """Whether `spec` is an address or the name of a recipe."""
    return "://" in spec or recipe_of(spec) is not None


def open_remote(
    spec: str,
    options: ReadOptions,
    *,
    documents: int | None = None,
    hub: Hub | None = None,
) -> Source:
    """The source that an address or a recipe's name means; little is fetched before it is read."""
    from foundling.data.hub.opening import open_address, open_hub

    hub = hub or Hub()
    known = recipe_of(spec)
    if known is not None:
        return open_hub(spec, known[1], options, hub, documents=documents, recipe=known[0])
    if spec.startswith(PREFIX):
        uri = parse_uri(spec)
        if uri.kind != "dataset":
            raise DataError(f"{spec} is a model; data is hf://datasets/{uri.repo}.")
        return open_hub(spec, uri, options, hub, documents=documents)
    return open_address(spec, options, documents=documents)
