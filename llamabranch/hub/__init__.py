"""From the name of a model to its file: models.txt, the caches of this machine, the Hugging Face hub."""

from .caches import LocalModel, find, hub_cache, local_models, parts
from .catalogue import (
    BUNDLED_DRAFT,
    BUNDLED_HEAD,
    BUNDLED_TARGET,
    CatalogueEntry,
    catalogue,
    draft_for,
    parse_catalogue,
)
from .download import search_hub
from .fetch import download_allowed, fetch, is_offline, obtain
from .resolve import Absent, locate, look_up, resolve
from .spec import HubSpec

__all__ = [
    "BUNDLED_DRAFT",
    "BUNDLED_HEAD",
    "BUNDLED_TARGET",
    "Absent",
    "CatalogueEntry",
    "HubSpec",
    "LocalModel",
    "catalogue",
    "download_allowed",
    "draft_for",
    "fetch",
    "find",
    "hub_cache",
    "is_offline",
    "local_models",
    "locate",
    "look_up",
    "obtain",
    "parse_catalogue",
    "parts",
    "resolve",
    "search_hub",
]
