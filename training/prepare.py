"""Turn the corpus into a tokenizer and arrays of tokens.

Reads `fairy.txt`, `children_novels.txt` and `novels.txt` (or `.xz`): UTF-8, documents separated by
a line `<|doc|>`. Writes `tokenizer.json`, `<group>.train.npy`, `<group>.heldout.npy` (uint16) and
`meta.json`. Held-out text is removed before the vocabulary is learned.

    python -m training.prepare CORPUS_DIR WORK_DIR
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

GROUPS = {"fairy": "fairy.txt", "children": "children_novels.txt", "novels": "novels.txt"}
END = "<|endoftext|>"
VOCABULARY_NOVELS = 4_000_000  # characters of novels from which the vocabulary is learned
ASCII = str.maketrans(
    {
        "‘": "'", "’": "'", "‚": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"',
        "–": "-", "—": "--", "―": "--", "…": "...", "\u00a0": " ", "\t": " ", "_": "", "\ufeff": "",
    }
)  # fmt: skip
NOTE_MARK = re.compile(r"\s?\[(?:\d+|\*)\]")
NOTE = re.compile(r"^\s*\[(?:\d+|\*|Illustration|Note)|\[Note by|Project Gutenberg", re.I)
HEADING = re.compile(r"^[A-Z][A-Z0-9 ,.;:!?'\"()&\[\]-]{3,70}$")
CLOSED = re.compile(r"""[.!?:;]['")]*$|--$""")


def read_documents(path: Path) -> list[str]:
    """Return the documents of one file; a missing `x.txt` is read from `x.txt.xz`."""
    packed = path.with_name(path.name + ".xz")
    data = path.read_bytes() if path.exists() else lzma.decompress(packed.read_bytes())
    text = data.decode("utf-8").replace("\r\n", "\n")
    return [d for d in text.split("<|doc|>") if d.strip()]


def paragraphs(document: str) -> list[str]:
    """Return a document's paragraphs: ASCII punctuation, lines joined, without notes and contents."""
    lines: list[str] = []
    in_contents = False
    for raw in document.translate(ASCII).splitlines():
        line = re.sub(r" +", " ", raw).strip()
        if re.fullmatch(r"(table of )?contents[.:]?", line, re.I):
            in_contents = True
        in_contents = in_contents and len(line) < 60
        if not in_contents and not NOTE.search(line):
            lines.append(NOTE_MARK.sub("", line))
    filled = [len(line) for line in lines if line]
    if not filled:
        return []
    wrapped = sorted(n for n in filled if n <= 110) or [0]
    wrap = wrapped[int(len(wrapped) * 0.95)]
    spaced = 1 - len(filled) / len(lines) >= 0.1  # blank lines separate the paragraphs
    complete, current = [], ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        current = f"{current} {line}".strip()
        if spaced and not HEADING.match(line):
            ends = not following
        else:  # a line with room for the next word is the last of its paragraph
            room = len(line) + len(following.split(" ")[0]) < wrap - 3 or len(line) > 110
            ends = (
                not following or bool(HEADING.match(line)) or (room and bool(CLOSED.search(line)))
            )
        if ends and current:
            complete.append(current)
            current = ""
    return [p for p in complete if not (p.startswith('"') and p.isupper())]  # captions of pictures


def tales(document: list[str]) -> list[list[str]]:
    """Split a collection of tales at its headings; a heading becomes the title."""
    pieces: list[list[str]] = [[]]
    for paragraph in document:
        if HEADING.match(paragraph) and any(len(p) > 80 for p in pieces[-1]):
            pieces.append([])
        pieces[-1].append(paragraph)
    return [p for p in pieces if sum(map(len, p)) > 200]


def sections(document: list[str], size: int) -> list[list[str]]:
    """Split a novel into sections of about `size` characters, at paragraph ends."""
    pieces: list[list[str]] = [[]]
    for paragraph in document:
        if sum(map(len, pieces[-1])) > size:
            pieces.append([])
        pieces[-1].append(paragraph)
    return pieces


def split(pieces: list[list[str]], every: int, joined: bool) -> tuple[list[str], list[str]]:
    """Return (training texts, held-out texts): each `every`-th piece is held out.

    With `joined`, consecutive pieces form one text up to the next held-out piece.
    """
    train: list[str] = []
    heldout: list[str] = []
    follows = False
    for i, piece in enumerate(pieces):
        text = "\n\n".join(piece)
        if i % every == every // 2:
            heldout.append(text)
            follows = False
        elif follows and joined:
            train[-1] += "\n\n" + text
        else:
            train.append(text)
            follows = True
    return train, heldout


def learn_vocabulary(texts: list[str], size: int) -> Tokenizer:
    """Return a byte-level BPE whose splitting is llama.cpp's `gpt-2`; `END` has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return the texts as one array of uint16, `END` after each."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([t + END for t in texts]):
        ids.extend(encoding.ids)
    return np.asarray(ids, dtype=np.uint16)


def main() -> None:
    """Prepare the text."""
    parser = argparse.ArgumentParser(description="corpus to tokenizer and token arrays")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--heldout-every", type=int, default=33, help="hold out 1 piece in N")
    parser.add_argument("--section", type=int, default=20_000, help="characters of a section")
    parser.add_argument("--keep-tokenizer", action="store_true", help="learn none")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    train: dict[str, list[str]] = {}
    heldout: dict[str, list[str]] = {}
    seen: set[str] = set()
    for group, name in GROUPS.items():
        collected: list[list[str]] = []
        train[group], heldout[group] = [], []
        for document in read_documents(args.corpus / name):
            text = paragraphs(document)
            opening = re.sub(r"\W", "", "".join(text))[:40].lower()
            if opening in seen:  # the novels contain the children's books again
                continue
            seen.add(opening)
            if group == "fairy":
                collected += tales(text)
                continue
            kept, held_out = split(sections(text, args.section), args.heldout_every, joined=True)
            train[group] += kept
            heldout[group] += held_out
        if collected:
            train[group], heldout[group] = split(collected, args.heldout_every, joined=False)

    if args.keep_tokenizer:
        tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    else:
        sample = [t[: VOCABULARY_NOVELS // max(1, len(train["novels"]))] for t in train["novels"]]
        tokenizer = learn_vocabulary(train["fairy"] + train["children"] + sample, args.vocab)
        tokenizer.save(str(args.work / "tokenizer.json"))
    meta: dict[str, dict[str, int]] = {}
    for group in GROUPS:
        for part, texts in (("train", train[group]), ("heldout", heldout[group])):
            ids = encode(tokenizer, texts)
            np.save(args.work / f"{group}.{part}.npy", ids)
            n_bytes = sum(len(t.encode()) for t in texts)
            meta[f"{group}.{part}"] = {"texts": len(texts), "tokens": len(ids), "bytes": n_bytes}
    (args.work / "meta.json").write_text(json.dumps(meta, indent=1))
    print(json.dumps(meta, indent=1))


if __name__ == "__main__":
    main()
