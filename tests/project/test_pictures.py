"""Pictures for notebooks: well-formed, escaped, without scripts, readable in light and in dark."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

import llamabranch as lb
from llamabranch import pictures

VOID = {"meta", "br", "hr"}
HOSTILE = "<script>alert(1)</script><img src=x onerror=\"a('b')\">&amp;"


class Reader(HTMLParser):
    """Checks that tags are closed in order; collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(picture: str) -> Reader:
    """Return what a picture consists of, once it is known to be harmless and well-formed."""
    reader = Reader()
    reader.feed(picture)
    reader.close()
    assert reader.open == []
    assert set(reader.tags) <= {
        *("div", "span", "table", "tr", "td", "hr", "h1"),
        *("html", "head", "meta", "title", "body"),
    }
    assert {name for name, _ in reader.attributes} <= {
        *("style", "title", "lang", "charset", "name", "content"),
    }
    for name, value in reader.attributes:
        if name == "style" and value is not None:
            assert "url(" not in value
            # A fixed colour of the text, or an opaque one behind it, could not be read on some page.
            assert not re.search(r"(^|;)color:", value)
            for colour in re.findall(r"background:([^;]+)", value):
                assert colour == "none" or re.fullmatch(r"rgba\(\d+,\d+,\d+,0?\.\d+\)", colour)
    return reader


TOKENS = st.builds(
    pictures.Token,
    text=st.text(max_size=6),
    logprob=st.floats(-60, 0) | st.just(math.nan) | st.just(-math.inf),
    entropy=st.floats(0, 12) | st.just(math.nan),
    source=st.sampled_from(["drafted", "bonus", "corrected", "plain"]),
)


@given(st.lists(TOKENS, max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_any_tokens_give_a_harmless_picture(
    tokens: list[pictures.Token], prompt: str, caption: str
) -> None:
    read(pictures.tokens_picture(tokens, prompt=prompt, caption=caption))
    pruned = pictures.TreeLine(tokens, prompt, status="pruned")
    below = pictures.TreeLine(tokens, prompt, [pruned], n_hidden=2)
    read(pictures.tree([pictures.TreeLine(tokens, caption, [pruned, below, below])]))
    read(pictures.tree([pictures.TreeLine(tokens, caption, [below])]))


def test_text_is_escaped_and_what_cannot_be_seen_is_written_as_its_code() -> None:
    reader = read(pictures.tokens_picture([pictures.Token(HOSTILE + "\x00\u202eabc\n")]))
    assert HOSTILE in reader.text
    assert "\\u0000" in reader.text
    assert "\\u202eabc\n" in reader.text


def test_colours_follow_the_source_or_the_probability() -> None:
    tokens = [
        pictures.Token("a", math.log(0.99), 0.1, "drafted"),
        pictures.Token("b", math.log(0.01), 4.0, "corrected"),
        pictures.Token("c", math.log(0.5), 2.0),
    ]

    def alphas(picture: str) -> list[str]:
        return re.findall(r"rgba\([\d,]+,([\d.]+)\);border-radius:2px\" title", picture)

    drafted = pictures.tokens_picture(tokens)
    assert alphas(drafted) == [".38", ".48"]
    assert "p = 0.99, entropy 0.10 nats, drafted and accepted" in drafted
    plain = [dataclasses.replace(token, source="plain") for token in tokens]
    assert alphas(pictures.tokens_picture(plain)) == ["0.01", "0.59", "0.30"]


def test_long_texts_show_their_end() -> None:
    tokens = [pictures.Token("x ", -1.0)] * (pictures.MOST_TOKENS + 5)
    reader = read(pictures.tokens_picture(tokens))
    assert "(5 tokens before)" in reader.text


def test_branch_and_store_draw_themselves_in_every_state(ctx: lb.Context) -> None:
    root = lb.Branch.start(ctx, "Once upon a time", temperature=0.8, seed=1)
    store = lb.BranchStore(ctx)
    assert "no branches" not in store._repr_html_()
    left, right = root.fork_many(2)
    for _ in range(5):
        store.step([left, right])
    reader = read(left._repr_html_())
    assert "Once upon a time" in reader.text
    assert ctx.model.detokenize(left.generated) in reader.text
    shown = read(store._repr_html_()).text
    texts = [ctx.model.detokenize(branch.generated) for branch in (left, right)]
    assert shown.index("Once upon a time") < shown.index(texts[0]) < shown.index(texts[1])
    assert f"log p {left.log_likelihood():.2f}, ready" in shown
    assert read(store.tree()._repr_html_()).text in shown
    with lb.Branch.create(ctx) as empty:
        read(empty._repr_html_())
    left.prune()
    assert "pruned" in read(left._repr_html_()).text
    right.prune()
    root.prune()
    assert "no branches" in read(store._repr_html_()).text


def test_generation_and_result_colour_tokens_by_source(
    ctx: lb.Context, draft_ctx: lb.Context
) -> None:
    sampling = lb.SamplingParams(temperature=0.8, seed=1)
    config = lb.SpeculativeConfig(draft_k=4)
    speculator = lb.Speculator(ctx, lb.ModelDrafter(draft_ctx), config)
    generation = speculator.generate("Once upon a time", max_tokens=24, sampling=sampling).finish()
    assert [each.token for each in generation.emitted] == generation.tokens
    reader = read(generation._repr_html_())
    assert generation.text in reader.text
    assert "drafted and accepted" in reader.text
    engine = lb.Engine(ctx, sampling=sampling, max_tokens=8)
    (result,) = engine.generate(["Once upon a time"])
    assert [each.token for each in result.emitted] == result.tokens
    reader = read(result._repr_html_())
    assert "Once upon a time" + result.text in reader.text
    assert "request 0, sample 0: 8 tokens, length" in reader.text


def test_search_result_draws_its_tree(ctx: lb.Context) -> None:
    with lb.Branch.start(ctx, "Once upon a time") as root:
        found = lb.search.beam_search(root, 4, max_tokens=300, n=4)
    shown = read(found._repr_html_()).text
    assert shown.startswith("4 hypotheses; ")
    for each in found.hypotheses:
        assert f"score {each.score:.3f}" in shown
    assert found.best.node.text in shown
    prompt = lb.search.SearchNode(None, (), 0.0)
    ended_at_once = lb.search.Hypothesis([], "", -1.0, -1.0, "stop", prompt)
    empty = lb.search.SearchResult([ended_at_once], lb.search.SearchStats(), prompt)
    assert read(empty._repr_html_()).text.startswith("1 hypothesis; ")
