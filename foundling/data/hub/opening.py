"""From a name to a source: which files it means, and who reads them."""

from dataclasses import replace

from foundling.config.errors import ConfigError, DataError
from foundling.data.hub.client import Hub
from foundling.data.hub.layout import Choice, choose
from foundling.data.hub.recipes import Recipe, merged
from foundling.data.hub.remote import remote_files
from foundling.data.hub.source import RemoteSource, hub_source
from foundling.data.hub.stack import StackSource
from foundling.data.hub.uri import HubUri
from foundling.data.sources.base import Source
from foundling.data.sources.opening import form_of
from foundling.data.sources.options import ReadOptions


def readable(name: str) -> bool:
    """Whether a file is data to us, by its name."""
    if name.rpartition("/")[2] in ("dataset_info.json", "dataset_infos.json", "config.json"):
        return False
    try:
        return form_of(name) is not None
    except DataError:
        return False


def open_hub(
    spec: str,
    uri: HubUri,
    options: ReadOptions,
    hub: Hub,
    *,
    documents: int | None = None,
    recipe: Recipe | None = None,
) -> Source:
    """A data set of the hub, by a recipe or by its address alone."""
    name = recipe.name if recipe else uri.name
    if recipe is not None:
        options = merged(recipe, options)
    choice = choose(hub, uri, readable)
    if recipe is not None and recipe.blobs:
        return _stack(name, spec, choice, options, hub, documents)
    if choice.files:
        return hub_source(name, spec, hub, choice.repo, choice.files, options, documents)
    from foundling.data.hub.stream import library_source

    return library_source(name, uri, choice, options, hub, documents)


def _stack(
    name: str, spec: str, choice: Choice, options: ReadOptions, hub: Hub, documents: int | None
) -> StackSource:
    if documents is not None:
        raise DataError(f"{name} cannot be limited by documents; limit its tokens.")
    if options.template or options.text != "content" or options.schema != "text":
        raise ConfigError(
            f"a document of {name} is a file of source code, so --text, --template and --schema"
            " have no effect; leave them out."
        )
    stream, options = options.stream, replace(options, stream=False)
    return StackSource(name, spec, hub, choice.repo, choice.files, options, stream)


def open_address(spec: str, options: ReadOptions, *, documents: int | None = None) -> RemoteSource:
    """Files at any other address; nothing of them is kept, with or without --stream."""
    files = tuple(remote_files(spec, readable))
    path = spec.partition("?")[0].rstrip("/")
    name = path.rpartition("/")[2] or spec
    return RemoteSource(name, files, documents, replace(options, stream=False))
