"""The outline of a tree: every node once, pruned or going on; its picture shows all of it."""

from __future__ import annotations

from collections.abc import Iterator

from llamabranch import Branch, Context, search
from llamabranch.search import SearchNode, TreeLine, outline


def every_line(line: TreeLine) -> Iterator[TreeLine]:
    yield line
    for below in line.lines:
        yield from every_line(below)


def test_each_node_is_in_one_line_or_pruned_from_one(ctx: Context) -> None:
    with Branch.start(ctx, "Once upon a time") as branch:
        found = search.beam_search(branch, 4, 16, n=3)
    lines = list(every_line(outline(found.tree)))
    listed = [node for line in lines for node in line.nodes]
    given_up = [node for line in lines for head in line.pruned for node in head.walk()]
    assert len(listed) == len(set(listed))
    assert {*listed, *given_up} == set(found.tree.walk())
    assert sum(line.n_pruned for line in lines) == len(given_up)
    assert all(node.status == "pruned" for node in given_up)
    ends = [line.nodes[-1] for line in lines if not line.lines]
    assert {h.node for h in found.hypotheses} == set(ends)
    assert ends[0] is found.best.node  # the best comes first
    assert sum(len(line.text) for line in lines) >= len(found.text)


def test_a_picture_has_every_text_and_counts_what_was_given_up(ctx: Context) -> None:
    with Branch.start(ctx, "Once upon a time") as branch:
        found = search.beam_search(branch, 2, 6)
    picture = search.tree_picture(found.tree, prompt="Once")
    for node in found.best.node.path:
        assert node.text.strip() in picture
    assert "given up" in picture
    assert f"score {found.best.score:.3f}" in picture


def test_only_some_of_many_are_listed() -> None:
    root = SearchNode(None, (), 0.0)
    for token in range(100):
        child = SearchNode(root, (token,), -1.0 - token, f"<{token}>")
        child.status = "pruned" if token else "finished"
    line = outline(root)
    assert len(line.pruned) == line.n_pruned == 99
    assert [node.tokens[0] for node in line.pruned[:2]] == [1, 2]  # the most probable first
    picture = search.tree_picture(root)
    assert "&lt;1&gt;" in picture and "&lt;99&gt;" not in picture
    assert "99 given up" in picture and "and 59 more" in picture
