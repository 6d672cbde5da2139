"""Names of models on the hub, and which files of a repository they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llamabranch as lb
from llamabranch.hub.choice import HubSpec, choose

# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf.co/user/repo:Q4_K_M", HubSpec("user/repo", tag="Q4_K_M")),
        ("https://huggingface.co/user/repo", HubSpec("user/repo")),
        ("user/repo:Q8_0@v1.0", HubSpec("user/repo", "v1.0", "Q8_0")),
        ("user/repo@refs/pr/3:F16", HubSpec("user/repo", "refs/pr/3", "F16")),
        ("user/repo@main/a/model.gguf", HubSpec("user/repo", "main", file="a/model.gguf")),
        ("user/repo.gguf/model.gguf", HubSpec("user/repo.gguf", file="model.gguf")),
    ],
)
def test_name_of_the_hub_is_parsed(text: str, expected: HubSpec) -> None:
    assert HubSpec.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("tale-target", "./user/repo", "/user/repo", "~/repo", "models/tale.gguf", "a//b", "a/"),
        *("../b", "a--b/c", "a/b..c", "a/-b", "a b/c", "ü/b", "a/b:", "a/b@", "a/" + "b" * 120),
        *("hf:repo", "hf:", "a/b:Q8_0:F16", "a/b@x@y", "a/b:Q8_0/model.gguf"),
    ],
)
def test_paths_words_and_contradictory_names_are_no_names_of_the_hub(text: str) -> None:
    assert HubSpec.parse(text) is None


NAMES = st.from_regex(r"[A-Za-z0-9_]{1,8}([.-][A-Za-z0-9_]{1,6}){0,2}", fullmatch=True)
WORDS = st.from_regex(r"[A-Za-z0-9_]{1,8}", fullmatch=True)


@given(NAMES, NAMES, st.none() | WORDS, st.none() | WORDS, st.none() | WORDS)
def test_name_of_a_spec_parses_to_it(
    owner: str, name: str, revision: str | None, tag: str | None, file: str | None
) -> None:
    spec = HubSpec(
        f"{owner}/{name}", revision, None if file else tag, f"{file}.gguf" if file else None
    )
    assert HubSpec.parse(f"hf:{spec}") == spec


# -- which file ------------------------------------------------------------------------------------

LISTING = (
    "README.md", "config.json", "imatrix.dat", "m-BF16.gguf", "m-F16.gguf", "m-IQ4_0.gguf",
    "m-IQ4_XS.gguf", "m-Q4_0.gguf", "m-Q4_0_4_4.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf",
    "m-Q8_0.gguf", "m-UD-Q6_K_XL.gguf", "mmproj-F16.gguf", "mmproj-Q4_K_M.gguf",
    "m.imatrix-Q8_0.gguf", "mtp-m-Q8_0.gguf", "eagle3-m-Q8_0.gguf",
)  # fmt: skip


REST = tuple(path for path in LISTING if "Q4_K_M" not in path)
NAMED = ("a-F16-distilled-Q4_0.gguf", "a-F16-distilled-F16.gguf")


@pytest.mark.parametrize(
    ("listing", "tag", "file"),
    [
        (LISTING, None, "m-Q4_K_M.gguf"),
        (REST, None, "m-Q8_0.gguf"),
        ([path for path in REST if "Q8_0" not in path], None, "m-BF16.gguf"),  # the first
        *((LISTING, tag, "m-UD-Q6_K_XL.gguf") for tag in ("UD", "UD-Q6_K_XL", "Q6_K_XL")),
        (NAMED, "F16", NAMED[1]),  # the end of a name counts before its middle
        (NAMED[:1], "F16", NAMED[0]),
    ],
)
def test_tag_chooses_the_file_that_it_names_whole(
    listing: Sequence[str], tag: str | None, file: str
) -> None:
    assert choose(listing, tag) == choose(reversed(listing), tag) == (file,)


def test_part_of_a_tag_is_no_tag() -> None:
    for tag in ("Q4_K", "K_M", "K", "16", "Q4", "0", "Q6_K", "XL", "nothing"):
        with pytest.raises(lb.ConfigError, match="no model with the tag") as caught:
            choose(LISTING, tag, where="a/b")
        assert "Q8_0" in str(caught.value.hint) and "mmproj" not in str(caught.value.hint)


def test_sidecar_files_are_chosen_by_their_name_only() -> None:
    for path in ("mmproj-F16.gguf", "mtp-m-Q8_0.gguf", "eagle3-m-Q8_0.gguf"):
        assert choose(LISTING, file=path) == (path,)
        with pytest.raises(lb.ConfigError, match="no GGUF model"):
            choose(["README.md", path])
    assert choose(["smtp-Q8_0.gguf"]) == ("smtp-Q8_0.gguf",)  # llama.cpp takes it for a head


def test_shards_are_one_model() -> None:
    shards = [f"Q4_K_M/m-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    listing = [*shards[::-1], "m-Q8_0.gguf", "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf"]
    assert choose(listing, file=shards[1]) == tuple(shards)
    assert choose([*shards, "m-Q8_0.gguf"], "Q4_K_M") == tuple(shards)
    assert choose([*shards, "m-Q8_0.gguf"]) == tuple(shards)
    for missing in shards:
        with pytest.raises(lb.ConfigError, match="lacks part"):
            choose([path for path in shards if path != missing], "Q4_K_M")


TAGS = (
    "Q4_0", "IQ4_0", "Q4_K_M", "Q4_K_S", "Q4_K", "Q8_0", "F16", "BF16", "F32", "IQ4_XS", "Q2_K_L",
    "Q4_0_4_4", "TQ1_0", "MXFP4",
)  # fmt: skip


@given(
    st.lists(st.tuples(WORDS, st.sampled_from("-._"), st.sampled_from(TAGS)), max_size=12),
    st.sampled_from(TAGS),
    st.booleans(),
)
@settings(max_examples=300)
def test_chosen_file_has_exactly_the_tag_and_is_found_whenever_one_has(
    names: list[tuple[str, str, str]], tag: str, lower: bool
) -> None:
    """Words may look like tags, or end in one. The test knows how the names were built."""
    named = {f"x{word}{mark}{quant}.gguf": quant for word, mark, quant in names}
    with_tag = {path for path, quant in named.items() if quant == tag}
    inside = re.compile(rf"(?<![A-Za-z0-9]){tag}[-.]", re.IGNORECASE)  # in the word
    try:
        (chosen,) = choose(named, tag.lower() if lower else tag)
    except lb.ConfigError:
        assert not with_tag
        return
    if with_tag:
        assert named[chosen] == tag
    else:
        assert inside.search(chosen)
