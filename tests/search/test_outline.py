"""The outline of a tree: every text once, pruned branches at the place of pruning; its picture."""

from __future__ import annotations

import math

import pytest

from llamabranch import Branch, Context, search
from llamabranch.pictures import TreeLine
from llamabranch.search import SearchNode, outline

STORY = "Once upon a time"


def text_and_children(line: TreeLine) -> tuple[str, list[str]]:
    return line.text, [child.text for child in line.children]


def test_every_text_is_drawn_below_what_it_continues(ctx: Context) -> None:
    with Branch.start(ctx, STORY) as branch:
        result = search.beam_search(branch, 4, 16, n=3)
    top = outline(result.tree, most_pruned=10_000)
    assert top.text == STORY and math.isnan(top.probability)
    drawn: dict[str, str] = {}  # the text up to each line: its status
    waiting = [("", top)]
    while waiting:
        above, line = waiting.pop()
        assert line.n_hidden == 0
        drawn[above + line.text] = line.status
        waiting += [(above + line.text, child) for child in line.children]
    given_up = [text for text, status in drawn.items() if status == "pruned"]
    heads = [
        STORY + node.path_text
        for node in result.tree.walk()
        if node.status == "pruned" and node.parent is not None and node.parent.status != "pruned"
    ]
    assert len(heads) == len(given_up) > 10
    assert all(any(text.startswith(head) for text in given_up) for head in heads)
    ends = [text for text, status in drawn.items() if status == "finished"]
    assert sorted(ends) == sorted(STORY + h.text for h in result.hypotheses)


def test_the_best_comes_first_and_scores_are_of_one_kind(ctx: Context) -> None:
    with Branch.start(ctx, STORY) as branch:
        result = search.beam_search(branch, 4, 12, n=4, length_penalty=0.7)
    line = outline(result.tree, most_pruned=0)
    while line.children:
        line = line.children[0]
    assert line.status == "finished" and line.figures == f"score {result.best.score:.3f}"
    for node in result.tree.walk():
        if node.tokens:
            assert node.score == pytest.approx(node.logprob / len(node.path) ** 0.7)


def test_a_line_begins_with_the_probability_of_its_first_token(ctx: Context) -> None:
    with Branch.start(ctx, STORY, temperature=1.0, seed=2) as branch:
        result = search.step_search(branch, len, 4, step=3, max_steps=3, max_tokens=9)
        for line in outline(result.tree).children:
            first = ctx.tokenize(line.text, add_special=False)[0]
            if ctx.detokenize([first]) == line.tokens[0].text:
                assert line.probability == pytest.approx(math.exp(branch.log_probs()[first]))
    for node in result.tree.walk():
        assert "".join(text for text, _ in node.pieces) == (node.text if node.tokens else "")
        if node.parent is not None:
            total = sum(logprob for _, logprob in node.pieces)
            assert node.parent.logprob + total == pytest.approx(node.logprob)


def test_pruned_branches_are_below_their_parent() -> None:
    root = SearchNode(None, (), 0.0, "Prompt")
    a = SearchNode(root, (1,), -0.5, " a")
    b = SearchNode(a, (2,), -1.0, " b")
    c = SearchNode(b, (3,), -1.5, " c")
    c.status = "finished"
    for parent, token, logprob in ((a, 8, -3.0), (b, 9, -2.0), (b, 7, -9.0)):
        SearchNode(parent, (token,), logprob, f" x{token}").status = "pruned"
    (line,) = outline(root, most_pruned=2).children
    assert text_and_children(line) == (" a", [" x8", " b"])
    assert text_and_children(line.children[1]) == (" b", [" x9", " c"])
    assert line.children[1].n_hidden == 1
    assert line.probability == pytest.approx(math.exp(-0.5))
    (line,) = outline(root, most_pruned=0).children
    assert text_and_children(line) == (" a b c", []) and line.n_hidden == 3


def test_only_some_of_many_are_listed() -> None:
    root = SearchNode(None, (), 0.0)
    for token in range(100):
        child = SearchNode(root, (token,), -1.0 - token, f"<{token}>")
        child.status = "pruned" if token else "finished"
    line = outline(root, most_pruned=2)
    assert (len(line.children), line.n_hidden) == (3, 97)
    assert [child.text for child in line.children[:2]] == ["<1>", "<2>"]  # the most probable first


def test_a_stop_string_is_not_found_in_the_prompt(ctx: Context) -> None:
    """The root knows the text of the prompt, for drawing; a stop string must not begin there."""
    with Branch.start(ctx, "He said: and") as branch:
        plain = search.beam_search(branch, 2, 6)
        stopped = search.beam_search(branch, 2, 6, stop="and" + plain.text[:2])
    assert stopped.text == plain.text
    assert stopped.tree.text == "He said: and"
