"""A tree of texts that continue each other: branches, turns of a chat, nodes of the page, beams."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_serials = itertools.count()  # to sort children by age


class TextNode:
    """A text in a tree; a dataclass with a field ``parent`` can be one too.

    A text keeps its parent alive, but not its children: a text without references leaves the tree.

    Attributes:
        parent: the text that this one continues; None for a root.
    """

    __slots__ = ("__weakref__", "_children", "_serial", "parent")

    parent: Self | None

    def __init__(self, parent: Self | None = None) -> None:
        self.parent = parent
        self.__post_init__()

    def __post_init__(self) -> None:
        self._serial = next(_serials)
        # By serial number. Most texts have no children.
        self._children: weakref.WeakValueDictionary[int, Self] | None = None
        TextNode.hang(self, self.parent)

    def hang(self, parent: Self | None) -> None:
        """Move this text, with all texts below it, under another one; None makes it a root."""
        if self.parent is not None and self.parent._children is not None:
            self.parent._children.pop(self._serial, None)
        self.parent = parent
        if parent is not None:
            if parent._children is None:
                parent._children = weakref.WeakValueDictionary()
            parent._children[self._serial] = self

    @property
    def children(self) -> list[Self]:
        """The texts that directly continue this one, oldest first."""
        refs = [] if self._children is None else self._children.valuerefs()
        children = [child for ref in refs if (child := ref()) is not None]
        return sorted(children, key=lambda child: child._serial)

    def subtree(self) -> list[Self]:
        """Return this text and all below it, each text before its children."""
        nodes: list[Self] = []
        waiting = [self]
        while waiting:
            nodes.append(waiting.pop())
            waiting += reversed(nodes[-1].children)
        return nodes

    def ancestors(self) -> Iterator[Self]:
        """Yield this text, its parent, and so on up to the root."""
        node: Self | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def path(self) -> list[Self]:
        """The texts from the root to this one, in order."""
        return [*self.ancestors()][::-1]
