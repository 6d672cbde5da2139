"""Make the tasks that are shipped with the package (``llamabranch/eval/suite``), from novels.

``python -m training.tasks novels.txt.xz llamabranch/eval/suite``

The same text gives the same files. Three tasks, of passages from the novels in ``BOOKS``:

last_word       a passage without its last word, which occurs earlier in it
true_ending     which of four sentences of the book comes next
sentence_order  in which of four orders the next three sentences come
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path

# How each novel begins, its title and its author: one of each author, all dead before 1956.
BOOKS = {
    "THE ROSARY": ("The Rosary", "Florence L. Barclay"),
    "THE GRAND BABYLON": ("The Grand Babylon Hotel", "Arnold Bennett"),
    "LORNA DOONE": ("Lorna Doone", "R. D. Blackmore"),
    "Lady Audley": ("Lady Audley's Secret", "M. E. Braddon"),
    "THE INNOCENCE OF FATHER BROWN": ("The Innocence of Father Brown", "G. K. Chesterton"),
    "THE SORROWS OF SATAN": ("The Sorrows of Satan", "Marie Corelli"),
    "The Lost World": ("The Lost World", "Arthur Conan Doyle"),
    "WIVES AND DAUGHTERS": ("Wives and Daughters", "Elizabeth Gaskell"),
    "The Odd Women": ("The Odd Women", "George Gissing"),
    "KING SOLOMON": ("King Solomon's Mines", "H. Rider Haggard"),
    "RODERICK HUDSON": ("Roderick Hudson", "Henry James"),
    "Women in Love": ("Women in Love", "D. H. Lawrence"),
    "THE WOOD BEYOND": ("The Wood Beyond the World", "William Morris"),
    "CATRIONA": ("Catriona", "Robert Louis Stevenson"),
    "The Warden": ("The Warden", "Anthony Trollope"),
    "The Woman in White": ("The Woman in White", "Wilkie Collins"),
    "NIGHT AND DAY": ("Night and Day", "Virginia Woolf"),
}
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_PLAIN = re.compile(r"[A-Za-z ,;:'.!?-]+")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Dr|St|Esq|No|Vol|Capt|Col|Sir|[A-Z])\.$")

Item = dict[str, object]
Passage = list[str]  # sentences that follow each other


def books(text: str) -> Iterator[tuple[str, list[Passage]]]:
    """Yield the title of each of ``BOOKS`` and its paragraphs as sentences."""
    for document in text.split("<|doc|>\n"):
        for begin, (title, _) in BOOKS.items():
            if document.lstrip()[: len(begin)] == begin:
                yield (
                    title,
                    [
                        passage
                        for part in re.split(r"\n\s*\n", document)
                        if (passage := _passage(part))
                    ],
                )


def _passage(paragraph: str) -> Passage:
    """Return the sentences of a paragraph; none if it is no plain prose."""
    joined = " ".join(paragraph.split())
    if not _PLAIN.fullmatch(joined):
        return []
    passage: Passage = []
    for sentence in _SENTENCE.split(joined):
        if passage and _ABBREVIATION.search(passage[-1]):
            passage[-1] += " " + sentence
        else:
            passage.append(sentence)
    return passage


def _n_words(text: str) -> int:
    return len(text.split())


def last_words(passages: Sequence[Passage], rng: random.Random) -> Iterator[Item]:
    """Yield passages of 40 to 80 words whose last word has occurred in them."""
    for passage in rng.sample(passages, len(passages)):
        for n in range(2, len(passage) + 1):
            text = " ".join(passage[:n])
            if not 40 <= _n_words(text) <= 80 or text[-1] != ".":
                continue
            before, _, word = text[:-1].rpartition(" ")
            known = re.findall(r"[A-Za-z]+", before.rpartition(". ")[0])
            if len(word) > 3 and word.isalpha() and word in known:
                yield {"context": before, "target": " " + word}
                break


def true_endings(passages: Sequence[Passage], rng: random.Random) -> Iterator[Item]:
    """Yield passages of 30 to 60 words with four sentences, of which one follows."""
    sentences = [s for passage in passages for s in passage if 8 <= _n_words(s) <= 18]
    for passage in rng.sample(passages, len(passages)):
        for n in range(1, len(passage)):
            text, right = " ".join(passage[:n]), passage[n]
            if not 30 <= _n_words(text) <= 60 or not 8 <= _n_words(right) <= 18:
                continue
            alike = [s for s in sentences if abs(len(s) - len(right)) <= 8 and s not in passage]
            if len(alike) < 3:
                break
            yield _shuffled(text, [right, *rng.sample(alike, 3)], rng)
            break


def sentence_orders(passages: Sequence[Passage], rng: random.Random) -> Iterator[Item]:
    """Yield a beginning with its next three sentences in four orders, of which one is the book's."""
    for passage in rng.sample(passages, len(passages)):
        for n in range(1, len(passage) - 2):
            text, three = " ".join(passage[:n]), passage[n : n + 3]
            if not 15 <= _n_words(text) <= 40 or not all(4 <= _n_words(s) <= 14 for s in three):
                continue
            others = rng.sample(list(permutations(three))[1:], 3)
            yield _shuffled(text, [" ".join(order) for order in (tuple(three), *others)], rng)
            break


def _shuffled(context: str, choices: Sequence[str], rng: random.Random) -> Item:
    order = rng.sample(range(len(choices)), len(choices))
    return {
        "context": context,
        "choices": [" " + choices[i] for i in order],
        "answer": order.index(0),
    }


TASKS = {
    "last_word": (last_words, 16),
    "true_ending": (true_endings, 14),
    "sentence_order": (sentence_orders, 18),
}


def main() -> None:
    """Write the tasks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("novels", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    with lzma.open(args.novels, "rt", encoding="utf-8") as file:
        all_books = list(books(file.read()))
    for name, (make, n_each) in TASKS.items():
        rng = random.Random(name)
        items = []
        for title, passages in all_books:
            for number, item in zip(range(n_each), make(passages, rng), strict=False):
                items.append({"id": f"{title}, {number + 1}", **item})
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        (args.folder / f"{name}.jsonl").write_text(lines, "utf-8")
        print(f"{name}: {len(items)} items, {len(lines)} characters")


if __name__ == "__main__":
    main()
