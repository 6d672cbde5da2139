"""The training recipe from end to end, with a few kilobytes of text and tiny networks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import llamabranch as lb
from llamabranch.context.runner import Batch
from llamabranch.context.token_states import kept_states

torch, tokenizers, _ = (
    pytest.importorskip(name, reason="the extra `train` is not installed")
    for name in ("torch", "tokenizers", "gguf")
)

from training.distill import sample  # noqa: E402
from training.eagle import load_head, unroll  # noqa: E402
from training.export import write, write_head  # noqa: E402
from training.loop import load_network, make_network  # noqa: E402

ROOT = Path(__file__).parents[2]
VOCAB = 320
PLACES = ["the mill", "a dark wood", "the old well", "the king's kitchen", "an inn by the sea"]
HEROES = [
    "a miller's daughter",
    "a lame soldier",
    "the youngest prince",
    "a tailor",
    "a goose-girl",
]
GIFTS = ["a golden thimble", "three grey feathers", "a loaf of bread", "a lantern", "a rusty key"]


def tale(i: int) -> str:
    """Return a small tale for the tests: a title, two paragraphs, curly quotes, a wrapped line."""
    place, hero, gift = PLACES[i % 5], HEROES[i * 2 % 5], GIFTS[i * 3 % 5]
    return (
        f"THE TALE OF NUMBER {i}\n\n"
        f"Once upon a time there lived near {place}\n{hero}, who owned nothing in the world "
        f"but {gift}[1]. “What good is it?” said the neighbours — and they laughed.\n\n"
        f"[1] A thing of no account.\n\n"
        f"But on the {i + 2}th evening there came an old woman out of {place}, and she said: ‘Give "
        f"me {gift}, and you shall have what you wish for.’ So it was done, and nobody laughed "
        f"any more.\n\n"
    )


def run(module: str, *arguments: object) -> str:
    """Run one command of the recipe as a user would, and return what it printed."""
    command = [sys.executable, "-m", f"training.{module}", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run prepare, train, distill and export once; return the directory they wrote."""
    corpus = tmp_path_factory.mktemp("corpus")
    work = tmp_path_factory.mktemp("work")
    parts = {"fairy": range(24), "children_novels": range(24, 40), "novels": range(40, 60)}
    for name, numbers in parts.items():
        (corpus / f"{name}.txt").write_text("".join(tale(i) for i in numbers), encoding="utf-8")
    toy = ["--size", "tiny", "--no-compile", "--threads", 1, "--tokens", 512, "--length", 64]
    toy += ["--long-length", 128, "--warmup-steps", 2, "--eval-every", 20]
    sampling = ["--sample-rows", 4, "--sample-length", 48, "--prompt-length", 8]
    prepared = ["--vocab", VOCAB, "--heldout-every", 6, "--section", 800]
    run("prepare", corpus, work, *prepared)
    run("train", work, "--steps", 40, *toy)
    run("distill", work, "--steps", 20, *toy, *sampling)
    run("eagle", work, "--steps", 20, *toy, *sampling)
    run("export", work, work, "--roles", "target", "draft", "eagle")
    run("export", work, work, "--type", "f32")
    return work


def tokenizer_in(folder: Path) -> Any:
    """Return the tokenizer that a step of the recipe wrote."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def shake(network: Any, amount: float = 0.1) -> Any:
    """Return the network with noise added, because a few training steps hardly change the attention."""
    torch.manual_seed(7)
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=amount)
    return network


def test_prepared_text_is_ascii_and_joined_and_heldout_tales_are_apart(work: Path) -> None:
    tokenizer = tokenizer_in(work)
    text, heldout = (
        tokenizer.decode(np.load(work / f"fairy.{part}.npy").tolist(), skip_special_tokens=False)
        for part in ("train", "heldout")
    )
    assert text.isascii()
    assert "near the mill a miller's daughter, who" in text
    assert '"What good is it?" said the neighbours -- and' in text
    assert "[1]" not in text and "no account" not in text
    assert text.startswith("THE TALE OF NUMBER 0\n\nOnce") and text.endswith("<|endoftext|>")
    there, left_out = ({*re.findall(r"NUMBER \d+", part)} for part in (text, heldout))
    assert len(left_out) == 4  # one in six of 24
    assert not there & left_out


def test_training_lowers_the_heldout_loss(work: Path) -> None:
    for role in ("target", "draft"):
        reports = [json.loads(x) for x in (work / f"{role}.log").read_text().splitlines()]
        measured = [r["heldout_fairy"] for r in reports if "heldout_fairy" in r]
        assert measured[-1] < 5.2 < np.log(VOCAB)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_llama_cpp_computes_the_logits_of_torch(work: Path, role: str) -> None:
    """If rotary pairs, K/V groups or tensor names were wrong, the logits would be far off."""
    network = shake(load_network(work / f"{role}.pt"))
    path = work / f"shaken-{role}.gguf"
    write(network, work / "tokenizer.json", role, "f32", path)
    tokens = np.random.default_rng(7).integers(1, VOCAB, 200).tolist()
    with torch.no_grad():
        wanted = network(torch.tensor([tokens]))[0].numpy()
    llama = llama_cpp.Llama(
        str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0
    )
    llama.eval(tokens)
    logits = np.array(llama.scores[: len(tokens)])
    llama.close()
    assert wanted.std() > 0.3
    assert np.abs(logits - wanted).max() < 1e-2


def test_exported_pair_speaks_and_shares_its_tokenizer(work: Path) -> None:
    tokenizer = tokenizer_in(work)
    text = "Once upon a time, it's said:\n\n  \"Give me 3 feathers!\" -- and he'd laugh\xe9\u2603."
    for role in ("target", "draft"):
        path = work / f"tale-{role}-q8_0.gguf"
        with lb.Model(path) as model, lb.Context(model, n_ctx=256, n_threads=1) as ctx:
            assert model.tokenize(text) == tokenizer.encode(text).ids
            assert model.detokenize(model.tokenize(text)) == text
            assert model.eog_tokens == {0}
            assert model.metadata["general.license"] == "mit"
            branch = lb.Branch.start(ctx, "Once upon", temperature=0.0)
            assert list(branch.generate(max_tokens=24))


def test_head_reads_its_own_drafts_as_llama_cpp_lets_it(work: Path) -> None:
    """Three unrolled steps of the training equal three steps of a draft in llama.cpp, logits included."""
    target = load_network(work / "target.pt").requires_grad_(False)
    head = shake(load_head(work / "eagle.pt", target))
    write(target, work / "tokenizer.json", "target", "f32", work / "whole.gguf")
    write_head(head, target, work / "tokenizer.json", "f32", work / "head.gguf")
    tokens = np.random.default_rng(5).integers(1, VOCAB, 24).tolist()
    n = len(tokens) - 3
    with torch.no_grad():
        _, unrolled = unroll(target, head, torch.tensor([tokens]), 3)
    with (
        lb.load(work / "whole.gguf", n_threads=1, kv_type="f32") as ctx,
        lb.load(work / "head.gguf", target=ctx, n_threads=1, kv_type="f32") as ours,
        lb.Branch.start(ctx, tokens) as branch,
    ):
        features = kept_states(ctx, branch.sequence.seq_id, tokens, 0)
        states = ours.decoder.encode(features[:n])
        seq_id = ours.sequences.allocate(branch)
        for step in range(3):
            part = tokens[1 : n + 1] if step == 0 else tokens[n + step : n + step + 1]
            batch = Batch()
            batch.add(seq_id, part, "all")
            (rows,) = ours.decoder.decode(batch, states[-len(part) :])
            wanted = unrolled[step][0, -len(part) :].numpy()
            assert np.abs(np.stack([row.array for row in rows]) - wanted).max() < 1e-2
            states = ours.decoder.output_states(len(part))
        ours.sequences.free(seq_id)


def test_weights_and_tokenizer_come_back_from_a_file(work: Path, tmp_path: Path) -> None:
    run("restore", work / "tale-target-f32.gguf", tmp_path)
    there, back = load_network(work / "target.pt"), load_network(tmp_path / "target.pt")
    assert there.config == back.config
    for left, right in zip(there.parameters(), back.parameters(), strict=True):
        assert torch.equal(left, right)
    text = "The old mill, it's said, had 3 doors -- and one key."
    assert tokenizer_in(work).encode(text).ids == tokenizer_in(tmp_path).encode(text).ids


def test_sampler_with_cache_draws_from_the_softmax() -> None:
    """At a temperature near zero the sampler's text equals the greedy text without a cache."""
    network = shake(make_network("tiny"), 0.2)
    prompts = torch.randint(0, 320, (2, 5))
    text = sample(network, prompts, 8, torch.full((2,), 1e-4))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = network(text)
    chosen = logits[:, 4:-1].gather(-1, text[:, 5:, None])[..., 0].float()
    # bfloat16 rounds logits of about 8 to steps of 1/32; the two paths may differ by a few steps.
    assert bool((logits[:, 4:-1].max(-1).values.float() - chosen < 0.25).all())
