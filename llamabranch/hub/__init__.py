"""From the name of a model to its file: models.txt, the caches of this machine, the Hugging Face hub."""

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

__all__ = [
    "BUNDLED_DRAFT",
    "BUNDLED_HEAD",
    "BUNDLED_TARGET",
    "CatalogueEntry",
    "catalogue",
    "default_model",
    "draft_for",
    "fetch",
    "find_entry",
    "resolve",
]
