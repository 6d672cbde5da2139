"""From the name of a model to its file."""

from .catalogue import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    CatalogueEntry,
    catalogue,
    draft_for,
    locate,
    parse_catalogue,
    resolve,
)

__all__ = [
    "BUNDLED_DRAFT",
    "BUNDLED_TARGET",
    "CatalogueEntry",
    "catalogue",
    "draft_for",
    "locate",
    "parse_catalogue",
    "resolve",
]
