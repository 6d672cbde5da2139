"""From the name of a model to its file: models.txt, the caches of this machine, the Hugging Face hub."""

from .caches import LocalModel, hub_cache, local_models, parts
from .catalogue import (
    BUNDLED_DRAFT,
    BUNDLED_HEAD,
    BUNDLED_TARGET,
    CatalogueEntry,
    catalogue,
    default_model,
    draft_for,
    find_entry,
)
from .resolve import fetch, resolve
from .spec import HubSpec

__all__ = [
    "BUNDLED_DRAFT",
    "BUNDLED_HEAD",
    "BUNDLED_TARGET",
    "CatalogueEntry",
    "HubSpec",
    "LocalModel",
    "catalogue",
    "default_model",
    "draft_for",
    "fetch",
    "find_entry",
    "hub_cache",
    "local_models",
    "parts",
    "resolve",
]
