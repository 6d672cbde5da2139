"""EAGLE-3 heads and MTP layers: the text is the target's, the state follows the branch."""

from __future__ import annotations

import gc
import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import toys
from commands import answer, run, said_by
from test_drafted_text import CALLERS, Case, plain

import llamabranch as lb
from llamabranch.context.kv_file import HEADER
from llamabranch.context.token_states import kept_states
from llamabranch.errors import DecodeInterruptedError, ModelLoadError
from llamabranch.generation.drafter import DraftRequest, FixedLength
from llamabranch.native import heads, staging
from llamabranch.speculative.head import HeadState

DATA = Path(lb.__file__).parent / "data"
HEAD = DATA / "tale-eagle-q8_0.gguf"
KINDS = ("bundled", "bundled, own cells", "eagle3", "glm4moe", "qwen35", "mimo2", "gemma4")
SETTINGS = {
    "greedy": lb.SamplingParams(temperature=0.0),
    "seeded": lb.SamplingParams(temperature=0.8, seed=7),
    "penalties": lb.SamplingParams(temperature=0.9, seed=3, repeat_penalty=1.3, top_k=40),
}
PROMPTS = ("Once upon a time", "The king said", "In the dark wood there was")


class Pair(NamedTuple):
    """A target's context, and the drafter that reads its hidden states."""

    ctx: lb.Context
    drafter: lb.EagleDrafter | lb.MTPDrafter

    def plain(self, prompt: str, sampling: lb.SamplingParams, n: int = 24) -> list[int]:
        with lb.Branch.start(self.ctx, prompt, sampling=sampling) as branch:
            return [t.token for t in branch.generate(n)]

    def speculator(self, **config: object) -> lb.Speculator:
        return lb.Speculator(
            self.ctx,
            self.drafter,
            lb.SpeculativeConfig(**{"draft_k": 4, **config}),  # type: ignore[arg-type]
        )

    def drafted(
        self, prompt: str, settings: str, n: int = 24, **config: object
    ) -> lb.speculative.SpeculativeStats:
        """Generate with drafts; fail unless the text is the plain one."""
        sampling = SETTINGS[settings]
        generation = self.speculator(**config).generate(prompt, max_tokens=n, sampling=sampling)
        assert generation.finish().tokens == self.plain(prompt, sampling, n)
        return generation.stats

    def audit(self) -> None:
        self.ctx.audit()
        self.drafter.ctx.audit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def toy(kind: str, folder: Path) -> Path:
    """Return the toy of an architecture, with MTP layers in its own file; written once."""
    path = folder / f"{kind}.gguf"
    if not path.exists():
        toys.write_toy(path, kind, vocab="bytes", weights="f32")
    return path


def parts(kind: str, folder: Path) -> tuple[Path, Path]:
    """Return two files of a toy: its trunk, and its MTP layers."""
    paths = folder / f"{kind}-trunk.gguf", folder / f"{kind}-layers.gguf"
    if not paths[0].exists():
        toys.write_parts(toy(kind, folder), *paths)
    return paths


def open_pair(kind: str, folder: Path, target: lb.Model) -> Pair:
    """Open a pair. The bundled head is also opened with separate cells."""
    options: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 8, "n_threads": 1}
    if kind.startswith("bundled"):
        ctx, unified = lb.Context(target, exact=True, **options), kind == "bundled"
        head = lb.Context(lb.Model(HEAD), target=ctx, kv_unified=unified)
        return Pair(ctx, lb.EagleDrafter(head))
    if kind == "eagle3":
        model = lb.Model(toy("llama", folder))
        layers = lb.Model(toys.write_eagle3(folder / "eagle3.gguf", vocab="bytes"))
        ctx = lb.Context(model, **options)
        return Pair(ctx, lb.EagleDrafter(lb.Context(layers, target=ctx)))
    if kind == "gemma4":
        ctx = lb.Context(lb.Model(toy(kind, folder)), **options)
        layers = lb.Model(toy("gemma4-assistant", folder))
        return Pair(ctx, lb.MTPDrafter(lb.Context(layers, target=ctx)))
    ctx = lb.Context(lb.Model(toy(kind, folder), load_mtp=True), **options)
    return Pair(ctx, lb.MTPDrafter(lb.Context(ctx.model, target=ctx)))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, folder: Path, target: lb.Model) -> Iterator[Pair]:
    """Each kind of head; the toys have random weights, so nearly all of their drafts are rejected."""
    opened = open_pair(request.param, folder, target)
    yield opened
    opened.audit()
    opened.ctx.close()


@pytest.fixture(scope="module")
def eagle(folder: Path, target: lb.Model) -> Iterator[Pair]:
    """The bundled head."""
    opened = open_pair("bundled", folder, target)
    yield opened
    opened.ctx.close()


@pytest.mark.parametrize("caller", ["prompt", "session", "engine"])
def test_text_is_that_of_plain_decoding(pair: Pair, caller: str) -> None:
    cases = [Case(prompt, s, 24) for prompt in PROMPTS for s in SETTINGS.values()]
    cases.append(Case(PROMPTS[0], SETTINGS["seeded"], 20, grammar='root ::= "The " [a-z ]+ "."'))
    if caller == "engine":  # the toys are not exact, and some need sequences to draft
        cases = cases[1:9:3]
    wanted = [plain(pair.ctx, case) for case in cases]
    for length in (3, "auto"):
        config = lb.SpeculativeConfig(draft_k=length)
        texts, stats = CALLERS[caller](pair.ctx, pair.drafter, config, cases)
        assert [text.tokens for text in texts] == [text.tokens for text in wanted]
        assert [text.how for text in texts] == [text.how for text in wanted]
        assert length == "auto" or caller == "engine" or stats.num_drafts > 0
    assert pair.drafter.ctx.usage().cells_used == 0
    pair.audit()


def test_other_rules_and_an_entropy_stop_draft(pair: Pair) -> None:
    """Other tests show that these rules keep the distribution; this one, that they get the sources."""
    for settings in ({"rule": "token"}, {"rule": "block"}, {"draft_k": 6, "entropy_stop": 0.5}):
        sampling = SETTINGS["greedy" if "draft_k" in settings else "seeded"]
        generation = pair.speculator(**settings).generate(
            PROMPTS[1], max_tokens=20, sampling=sampling
        )
        assert len(generation.finish().tokens) == 20 or generation.finish_reason == "stop"
        if "draft_k" in settings:
            assert generation.stats.stop_reasons["entropy"] > 0
        else:
            assert generation.stats.num_drafts > 0
    pair.audit()


def test_drafts_of_several_texts_share_decodes_and_an_interrupted_one_is_drawn_again(
    pair: Pair,
) -> None:
    """The drafts equal those of each text alone, also if llama.cpp processes them in another order."""
    decoder = pair.drafter.ctx.decoder
    branches, requests, alone, n_alone = [], [], [], []
    for prompt in PROMPTS:
        tokens = pair.ctx.tokenize(prompt)
        branches.append(branch := lb.Branch.create(pair.ctx, SETTINGS["greedy"]))
        branch.prefill(tokens[:-1])
        state = pair.drafter.start(branch.sequence, "seeded")
        assert isinstance(state, HeadState)
        pair.drafter.ctx.interrupt()
        with pytest.raises(DecodeInterruptedError):
            state.propose(tokens, FixedLength(5), 5)
        assert not any(map(state.n_pairs, range(len(state.seq_ids))))
        before = decoder.n_decodes
        alone.append(state.propose(tokens, FixedLength(5), 5).tokens)
        n_alone.append(decoder.n_decodes - before)
        assert state.propose(tokens, FixedLength(5), 5).tokens == alone[-1] != []
        state.observe(0)
        requests.append(DraftRequest(state, tokens, FixedLength(5), 5))
    before = decoder.n_decodes
    drafts = pair.drafter.propose_many(requests)
    is_one = pair.drafter.ctx.params.kv_unified
    assert decoder.n_decodes - before == max(n_alone) or not is_one
    assert [draft.tokens for draft in drafts] == alone
    for request, branch in zip(requests, branches, strict=True):
        request.state.close()
        branch.prune()
    pair.audit()


def test_forks_and_rewound_branches_go_on_with_the_state(pair: Pair) -> None:
    """The kept state does not keep a branch alive: a forgotten branch gives its sequences back."""
    sampling = SETTINGS["seeded"]
    speculator, n_free = pair.speculator(), pair.ctx.n_seq_free
    with lb.Branch.start(pair.ctx, PROMPTS[2], sampling=sampling) as root:
        forgotten = root.fork()
        speculator.generate(forgotten, max_tokens=6).finish()
        del forgotten
        speculator.generate(root, max_tokens=8).finish()
        decodes = pair.drafter.ctx.decoder.n_decodes
        for child in root.fork_many(2):
            twin = child.fork()
            token_ids = speculator.generate(child, max_tokens=12).finish().tokens
            assert token_ids == [t.token for t in twin.generate(12)]
            twin.prune()
            speculator.forget(child)
            child.prune()
        assert pair.drafter.ctx.decoder.n_decodes > decodes
        n = root.position
        first = speculator.generate(root, max_tokens=14).finish().tokens
        root.rewind(n + 5)
        assert first == first[:5] + speculator.generate(root, max_tokens=9).finish().tokens
        speculator.forget(root)
    gc.collect()
    pair.audit()
    assert pair.drafter.ctx.usage().cells_used == 0 and pair.ctx.n_seq_free == n_free


def test_snapshots_load_with_and_without_a_head(
    eagle: Pair, target: lb.Model, tmp_path: Path
) -> None:
    """Its hidden states are not saved: where a head drafts, the tokens are decoded once more."""
    sampling = SETTINGS["seeded"]
    with lb.Context(target, n_ctx=256, n_threads=1, exact=True) as bare:
        for name, ctx in (("with", eagle.ctx), ("without", bare)):
            with lb.Branch.start(ctx, PROMPTS[1], sampling=sampling) as branch:
                list(branch.generate(6))
                branch.save(tmp_path / name)
                wanted = [t.token for t in branch.generate(10)]
            assert (tmp_path / name).read_bytes()[8] == 1  # the version
        (tmp_path / "before 0.5").write_bytes(with_hidden((tmp_path / "with").read_bytes()))
        for name in ("with", "without", "before 0.5"):
            with lb.Branch.load(bare, tmp_path / name) as restored:
                assert [t.token for t in restored.generate(10)] == wanted
            with lb.Branch.load(eagle.ctx, tmp_path / name) as restored:
                generation = eagle.speculator().generate(restored, max_tokens=10)
                assert generation.finish().tokens == wanted and generation.stats.num_drafts > 0
    eagle.audit()


def with_hidden(saved: bytes) -> bytes:
    """Return a snapshot as versions before 0.5 wrote it if a head had read its hidden states."""
    fields = list(HEADER.unpack(saved[: HEADER.size]))
    at = HEADER.size + 32 + fields[2]
    arrays = saved[at:] + bytes(4 * fields[3] * 768)
    fields[1], fields[6], fields[8] = 2, 768, hashlib.sha256(arrays).digest()
    header, metadata = HEADER.pack(*fields), saved[HEADER.size + 32 : at]
    return header + hashlib.sha256(header + metadata).digest() + metadata + arrays


def test_acceptance_of_the_bundled_head(eagle: Pair) -> None:
    """If a head read wrong states, about one token in a thousand would be accepted."""
    assert eagle.drafted(PROMPTS[0], "greedy", 80).draft_acceptance_rate > 0.1


def test_hidden_states_are_kept_only_while_a_head_reads_them(target: lb.Model) -> None:
    """Compaction keeps them. They are dropped with the head, when it is closed or garbage."""
    with lb.Context(target, n_ctx=256, n_seq_max=4, n_threads=1, exact=True) as ctx:
        head = lb.Context(lb.Model(HEAD), target=ctx, owns_model=True)
        with pytest.raises(lb.ConfigError, match="another head"):
            lb.Context(lb.Model(HEAD), target=ctx)
        with lb.Branch.start(ctx, "Once upon a time") as branch:
            before = kept_states(ctx, branch.sequence.seq_id, branch.tokens, 0)
            assert before.shape[1] == 3 * 256
            assert ctx.kv_cache.compact()
            hidden = ctx.kv_cache.hidden
            assert hidden is not None
            rows = [row for row in hidden.of(branch.sequence.seq_id) if row is not None]
            assert np.array_equal(np.stack(rows), before)
            head.close()
            branch.step()
            with pytest.raises(lb.errors.UnsupportedError, match="no hidden states"):
                kept_states(ctx, branch.sequence.seq_id, branch.tokens, 0)
        dropped = lb.Context(lb.Model(HEAD), target=ctx)
        del dropped
        gc.collect()
        with lb.Branch.start(ctx, "Once") as branch:
            branch.step()
            assert ctx.kv_cache.hidden is None
        last = lb.Context(lb.Model(HEAD), target=ctx)
    assert last.closed  # with its target


# -- contexts of other kinds -----------------------------------------------------------------------------


def three_after(pair: Pair, branch: lb.Branch) -> DraftRequest:
    """Return a request for a draft of three tokens after a branch's next token."""
    state = pair.drafter.start(branch.sequence, "seeded")
    return DraftRequest(state, [*branch.tokens, branch.produce().token], FixedLength(3), 3)


@pytest.mark.parametrize("own_head", [False, True], ids=["head unified", "head own"])
def test_head_drafts_once_there_is_room_for_the_states_it_lacks(
    own_head: bool, target: lb.Model
) -> None:
    """The head is opened late, and no sequence is free in which tokens could be decoded again."""
    for settings in SETTINGS.values():
        with lb.Context(target, n_ctx=512, n_seq_max=2, n_threads=1, exact=True) as ctx:
            branch = lb.Branch.start(ctx, PROMPTS[0], sampling=settings)
            list(branch.generate(10))
            twin = branch.fork()  # the other sequence
            head = lb.Context(
                lb.Model(HEAD), target=ctx, owns_model=True, n_seq_max=4, kv_unified=not own_head
            )
            pair = Pair(ctx, lb.EagleDrafter(head))
            speculator = pair.speculator(rule="seeded")
            first = speculator.generate(branch, max_tokens=12).finish()
            assert first.stats.num_drafts == 0 < first.stats.stop_reasons["capacity"]
            wanted = [t.token for t in twin.generate(24)]
            twin.prune()
            known = lb.Branch.start(ctx, PROMPTS[1], sampling=settings)
            drafts = pair.drafter.propose_many([three_after(pair, b) for b in (branch, known)])
            assert [len(draft.tokens) for draft in drafts] == [0, 3]
            known.prune()
            second = speculator.generate(branch, max_tokens=12).finish()
            assert second.stats.num_drafts > 0 and first.tokens + second.tokens == wanted
            speculator.forget(branch)
            branch.prune()
            pair.audit()
            head.close()


# -- what does not fit -----------------------------------------------------------------------------------


def test_what_is_no_context_no_drafter_and_no_pair_is_refused(
    eagle: Pair, target: lb.Model
) -> None:
    ctx: Any = eagle.ctx
    head, name = eagle.drafter.ctx, cast("Any", "tale-eagle")
    unsupported, wrong = lb.errors.UnsupportedError, lb.ConfigError
    alone, no_text = (
        lb.Context(target, n_ctx=256, n_threads=1, exact=True),
        "drafts for that context",
    )
    for error, words, call in (
        (unsupported, no_text, lambda: lb.Branch.create(head)),
        (unsupported, no_text, lambda: lb.Branch.start(head, "a")),
        (unsupported, no_text, lambda: lb.Engine(head)),
        (unsupported, no_text, lambda: lb.Speculator(head)),
        (unsupported, no_text, lambda: lb.InferenceSession(head, "a")),
        (unsupported, no_text, lambda: lb.ModelDrafter(head)),
        (wrong, "target must be a ", lambda: lb.load(name, target=ctx.model)),
        (wrong, "target must be a ", lambda: lb.load(name, target=name)),
        (wrong, "target must be a ", lambda: lb.Context(head.model, target=name)),
        (wrong, "model must be a ", lambda: lb.Context(name)),
        (wrong, "ctx must be a ", lambda: lb.EagleDrafter(name)),
        (wrong, "ctx must be a ", lambda: lb.ModelDrafter(name)),
        (wrong, "target must be a ", lambda: lb.MTPDrafter(name)),
        (wrong, "drafter must be a ", lambda: lb.Speculator(ctx, ctx)),
        (wrong, "drafter must be a ", lambda: lb.Engine(ctx, ctx)),
        (wrong, "drafter must be a ", lambda: lb.InferenceSession(ctx, "a").next_token(ctx)),
        (wrong, "chain must be a ", lambda: lb.ChainDrafter([ctx])),
        (wrong, "target must be a ", lambda: lb.Speculator(name)),
        (wrong, "target must be a ", lambda: lb.Engine(5)),  # type: ignore[arg-type]
        (wrong, "ctx must be a ", lambda: lb.Branch.start(ctx.model, "a")),
        (wrong, "another context", lambda: list(lb.Speculator(alone, eagle.drafter).generate("a"))),
        (wrong, "not open as an EAGLE-3 head", lambda: lb.EagleDrafter(alone)),
        (wrong, "no layer 7", lambda: heads.extract(ctx.decoder.handle, [7], True)),
    ):
        with pytest.raises(error, match=words):
            call()
    eagle.audit()
    alone.close()


GEMMA_16 = {
    f"attention.{size}": 16
    for size in ("key_length", "value_length", "key_length_swa", "value_length_swa")
} | {"rope.dimension_count": 16, "rope.dimension_count_swa": 16}
MISFITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "width": ("eagle3", {"n_embd": 32}, "hidden states of 32"),
    "layer": ("eagle3", {"metadata": {"target_layers": [0, 1, 9]}}, "reads layer 9"),
    "last layer": ("eagle3", {"metadata": {"target_layers": [0, 1, 2]}}, "layer 2"),
    "vocabulary": ("eagle3", {"vocab": "small"}, "vocabular"),
    "head sizes": ("eagle3", {"metadata": {"attention.key_length": 16}}, "keys have 16"),
    "rotation": ("eagle3", {"metadata": {"rope.dimension_count": 7}}, "rope.dimension_count"),
    "target's width": ("gemma4", {"n_embd": 32, "n_head": 1}, "hidden states of 64"),
    "order": ("gemma4", {"metadata": {"attention.sliding_window_pattern": [0, 1]}}, "last two layers"),
    "target's head size": (
        "gemma4", {"n_head": 4, "metadata": GEMMA_16}, "key_length is 32, but ",
    ),
    "heads": ("gemma4", {"n_head_kv": 2}, "reads 1 K/V heads, but layer 0 of misfit has 2"),
    "target's vocabulary": ("gemma4", {"vocab": "small"}, "vocabularies differ"),
    "layers, kind": ("mimo2", {}, "belong to a glm4moe model, and misfit is a mimo2 model"),
    "layers, width": (
        "glm4moe", {"n_embd": 32}, "hidden states of 64 numbers, but misfit has 32",
    ),
    "layers, vocabulary": ("glm4moe", {"vocab": "small"}, "vocabularies differ"),
    "no head": ("llama", {}, "is not an EAGLE-3 head and has no MTP layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_head_that_does_not_fit_is_refused_with_the_reason(
    case: str, folder: Path, target: lb.Model
) -> None:
    """An EAGLE-3 head, or MTP layers in a separate file, that belong to another target."""
    kind, options, reason = MISFITS[case]
    toy_options: dict[str, Any] = {"vocab": "bytes", "weights": "f32", **options}
    try:
        path = toys.write_toy(folder / "misfit.gguf", kind, **toy_options)
        if kind == "eagle3":
            head, path = lb.Model(path), toys.write_llama(folder / "fit.gguf", vocab="bytes")
        elif kind == "gemma4":
            head = lb.Model(toy("gemma4-assistant", folder))
        else:
            head = target if kind == "llama" else lb.Model(parts("glm4moe", folder)[1])
    except lb.errors.ModelLoadError:  # llama.cpp refuses the shapes itself
        return
    with lb.Model(path) as model, lb.Context(model, n_ctx=256, n_threads=1) as ctx:
        assert reason in model.head_fault(head)
        with pytest.raises(lb.errors.UnsupportedError, match=reason):
            lb.Context(head, target=ctx)
        if head is not target:
            with pytest.raises(
                lb.errors.UnsupportedError, match=r"together with (its|their) target"
            ):
                lb.Context(head)
            head.close()
        with lb.Branch.start(ctx, [2, 3]) as branch:  # the target is as before
            branch.step()


UNFIT: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # the file; its kind; why its layers cannot draft
    "none": ("llama", {}, "", "has no MTP layers"),
    "not loaded": ("glm4moe", {}, "mtp", "load_mtp=True"),
    "lacking": ("glm4moe", {"drop": ("blk.2.nextn.eh_proj.weight",)}, "", "lacks the weights|not loaded"),
    # On these llama.cpp would abort.
    "two": ("glm4moe", {"metadata": {"block_count": 4, "nextn_predict_layers": 2}}, "", ""),
    "unfused": ("mimo2", {"drop": ("blk.3.ffn_gate.weight",)}, "", r"needs blk\.3\.ffn_gate"),
    # It loads this file, and crashes at the first decode because the trunk is missing.
    "alone": ("", {}, "mtp-only", "predicts no tokens.*together with their target"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_mtp_needs_layers_that_are_there_and_can_be_computed(case: str, folder: Path) -> None:
    kind, options, head_kind, reason = UNFIT[case]
    path = parts("glm4moe", folder)[1]
    if kind:
        path = toys.write_toy(folder / "unfit.gguf", kind, vocab="bytes", weights="f32", **options)
    assert lb.Model.head_kind(path) == head_kind
    assert lb.Model.is_head(path) == (head_kind == "mtp-only")
    for load_mtp in {"unfused": (True,), "alone": (False, True), "two": ()}.get(case, (False,)):
        with (
            lb.Model(path, load_mtp=load_mtp) as model,
            pytest.raises(lb.errors.UnsupportedError, match=reason),
        ):
            lb.MTPDrafter(lb.Context(model, n_ctx=256, n_threads=1))


@pytest.mark.parametrize("kind", ["qwen35", "mimo2"])
def test_layers_in_a_file_of_their_own_draft_what_they_draft_in_the_targets(
    kind: str, folder: Path
) -> None:
    trunk, layers = parts(kind, folder)
    assert lb.Model.head_kind(trunk) == ""
    with (
        lb.load(trunk, n_ctx=512, n_threads=1) as ctx,
        lb.load(layers, target=ctx) as head,
        lb.load(toy(kind, folder), n_ctx=512, n_threads=1, load_mtp=True) as whole,
    ):
        pairs = Pair(ctx, lb.MTPDrafter(head)), Pair(whole, lb.MTPDrafter(whole))
        for settings in ("greedy", "seeded"):
            stats = [pair.drafted(PROMPTS[2], settings, draft_k=3) for pair in pairs]
            assert stats[0].num_accepted_tokens == stats[1].num_accepted_tokens
        pairs[0].audit()


def test_layers_in_the_last_part_of_a_split_model_draft(folder: Path) -> None:
    path, last = toys.write_split(toy("mimo2", folder), folder)
    assert lb.Model.head_kind(path) == "mtp"
    with lb.load(path, n_ctx=512, n_threads=1, load_mtp=True) as ctx:
        pair = Pair(ctx, lb.MTPDrafter(ctx))
        assert pair.drafted(PROMPTS[2], "greedy", 12).num_draft_tokens > 0
    last.unlink()
    with pytest.raises(ModelLoadError, match="part 2 of 2 is missing"):
        lb.Model.head_kind(path)


# -- several MTP layers ----------------------------------------------------------------------------------


def drafted(pair: Pair, branch: lb.Branch, text: list[int], *limits: int) -> list[int]:
    """Return the last of these drafts of a new state, each of at most so many tokens."""
    state = pair.drafter.start(branch.sequence, "seeded")
    try:
        for limit in limits:
            draft = state.propose(text, FixedLength(limit), limit).tokens
            state.observe(len(text) - 1)
        return draft
    finally:
        state.close()


@pytest.mark.parametrize("kind", ["mimo2", "hy_v3"])
def test_each_of_several_layers_drafts_a_token(kind: str, folder: Path, target: lb.Model) -> None:
    """Layers have their own K/V: a layer that drafts for the first time reads the whole text."""
    pair = open_pair(kind, folder, target)
    with pair.ctx as ctx, lb.Branch.create(ctx, SETTINGS["greedy"]) as branch:
        assert isinstance(pair.drafter, lb.MTPDrafter) and pair.drafter.n_layers == 3
        text = ctx.tokenize(
            "In the dark wood there was a house, and in the house there was a room, "
        )
        branch.prefill(text[:-1])
        whole = drafted(pair, branch, text, 8)
        assert len(whole) == 3
        assert drafted(pair, branch, text, 1, 2, 3) == whole
        state = pair.drafter.start(branch.sequence, "seeded")
        for n in range(8, len(text) + 1):  # the second and third layers fall behind
            limit = 1 if n < len(text) else 3
            draft = state.propose(text[:n], FixedLength(limit), limit).tokens
        assert draft == whole
        state.observe(len(text) - 4)
        assert state.propose(text, FixedLength(3), 3).tokens == whole
        state.observe(len(text) - 1)
        with branch.fork() as child:
            twin = state.fork(child.sequence)
            state.close()
            assert twin.propose(text, FixedLength(3), 3).tokens == whole
            twin.close()
        assert pair.drafter.ctx.usage().cells_used == 0
        pair.audit()


def test_full_cache_of_the_layers_ends_drafts_and_not_the_text(
    folder: Path, target: lb.Model
) -> None:
    path = toy("mimo2", folder)
    with (
        lb.load(path, n_ctx=512, n_threads=1, load_mtp=True) as ctx,
        lb.Context(ctx.model, target=ctx, n_ctx=256, n_seq_max=3) as head,
    ):
        pair = Pair(ctx, lb.MTPDrafter(head))
        no_end = dict.fromkeys(ctx.model.eog_tokens, -math.inf)
        endless = replace(SETTINGS["seeded"], logit_bias=no_end)
        text = pair.speculator().generate(PROMPTS[0], max_tokens=120, sampling=endless).finish()
        assert text.tokens == pair.plain(PROMPTS[0], endless, 120)
        assert text.stats.stop_reasons["capacity"] > 0
        pair.audit()
        with (
            lb.Branch.start(ctx, PROMPTS[1]) as branch,
            pytest.raises(lb.errors.SequencesExhaustedError),
        ):
            states = [pair.drafter.start(branch.sequence, "seeded") for _ in range(2)]
            assert states
        assert head.n_seq_free == 3


# -- layers that read the target's memory ----------------------------------------------------------------


def test_layers_without_memory_of_their_own_leave_the_targets_alone(
    folder: Path, target: lb.Model
) -> None:
    """llama.cpp would clear the target's cells with the head's. Calls that could do that are refused."""
    pair = open_pair("gemma4", folder, target)
    head = pair.drafter.ctx
    with pair.ctx as ctx, lb.Branch.start(ctx, PROMPTS[0]) as branch:
        before = ctx.usage()
        for call in (
            lambda: head.decode([2], 0),
            lambda: head.sequences.allocate(branch),
            lambda: head.kv_seq_copy(0, 1),
            lambda: head.kv_cache_remove(0),
            lambda: head.kv_seq_keep(0),
            head.kv_cache_clear,
        ):
            with pytest.raises(lb.errors.UnsupportedError, match="has no memory: it reads"):
                call()
        with pytest.raises(lb.errors.UnsupportedError, match="caches no prefixes"):
            lb.Context(head.model, target=ctx, prefix_cache=True)
        with (
            lb.Model(head.model.path) as again,
            pytest.raises(lb.errors.BranchStateError, match="opening it would empty"),
        ):
            lb.Context(again, target=ctx)
        assert ctx.usage() == before
        pair.audit()
        head.close()
        assert ctx.usage() == before
        branch.step()
        pair.ctx.audit()


def test_draft_ends_where_the_targets_memory_is_full(folder: Path, target: lb.Model) -> None:
    with (
        lb.load(toy("gemma4", folder), n_ctx=256, n_threads=1) as ctx,
        lb.load(toy("gemma4-assistant", folder), target=ctx) as head,
        lb.Branch.create(ctx, SETTINGS["greedy"]) as branch,
    ):
        text = [2 + i % 250 for i in range(257)]
        state = lb.MTPDrafter(head).start(branch.sequence, "seeded")
        branch.prefill(text[:-2])
        assert len(state.propose(text[:-1], FixedLength(3), 3).tokens) == 3
        branch.commit(text[-2])
        draft = state.propose(text, FixedLength(3), 3)
        assert (draft.tokens, draft.stopped) == ([], "capacity")
        ctx.audit()


def test_command_line_takes_heads(folder: Path) -> None:
    path = str(toy("glm4moe", folder))
    speculate = ("speculate", "Once upon", "-n", 8, "--seed", 1, "--draft-length", 2)
    trunk, layers = map(str, parts("mimo2", folder))
    gemma4, assistant = str(toy("gemma4", folder)), str(toy("gemma4-assistant", folder))
    for target, head in (
        ((), "tale-eagle"),
        (("--target", path), "mtp"),
        (("--target", path), "auto"),
        (("--target", trunk), layers),
        (("--target", gemma4), assistant),
    ):
        drafted = answer(*speculate, *target, "--draft", head)
        assert drafted["stats"]["num_draft_tokens"] > 0
        assert drafted["tokens"] == answer(*speculate, *target, "--draft", "none")["tokens"]
    for head, reason in (("mtp", "has no MTP layers"), (layers, "belong to a mimo2 model")):
        assert reason in said_by(*speculate, "--draft", head)


def test_models_show_tells_what_files_offer(folder: Path) -> None:
    misfit = answer("models", "show", str(toy("glm4moe", folder)), "tale-eagle")
    assert not misfit["compatible"] and "hidden states of 256" in misfit["reason"]
    assert misfit["models"][0]["mtp_layers"] == 1
    pair = answer("models", "show", *map(str, parts("mimo2", folder)))
    assert pair["compatible"] is True
    assert [(m["head_kind"], m["mtp_layers"]) for m in pair["models"]] == [("", 0), ("mtp-only", 3)]
    files = str(toy("gemma4", folder)), str(toy("gemma4-assistant", folder))
    shown = " ".join(run("models", "show", *files).stdout.split())
    for part in ("mtp layers 0 2", "shares memory no yes"):
        assert part in shown
    assert "can draft for the first" in shown


@pytest.mark.parametrize("missing", ["set_layer", "get_nextn"])
def test_missing_symbol_is_an_error_with_the_release_that_works(
    missing: str, monkeypatch: pytest.MonkeyPatch, target: lb.Model
) -> None:
    name, result, arguments = staging.STAGING[missing]
    monkeypatch.setitem(staging.STAGING, missing, (name + "_gone", result, arguments))
    _, reason = staging.look_up()
    assert name + "_gone" in reason and staging.KNOWN_RELEASE in reason
    monkeypatch.setattr(staging, "available", False)
    monkeypatch.setattr(staging, "reason", reason)
    with lb.Context(target, n_ctx=256, n_threads=1, exact=True) as ctx, lb.Model(HEAD) as head:
        with pytest.raises(lb.errors.UnsupportedError, match=re.escape(staging.KNOWN_RELEASE)):
            lb.Context(head, target=ctx)
        with lb.Branch.start(ctx, "Once") as branch:
            branch.step()
