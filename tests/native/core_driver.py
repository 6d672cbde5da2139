"""Runs the compiled core in this folder over hard rows. ``test_core.py`` starts it with sanitizers."""

from __future__ import annotations

import numpy as np
from compiled import core  # type: ignore[import-not-found]  # copies, beside this file
from rows import KINDS, SETTINGS, row

DEFAULT = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def main() -> None:
    assert core.available, core.description
    n_rows = 0
    for n_vocab in (2, 3, 15, 16, 17, 47, 48, 100, 1000, 1025, 4096, 20_000):
        rng = np.random.default_rng(n_vocab)
        rows = np.stack([row(rng, n_vocab, kind) for kind in KINDS])
        odd = rows.copy()
        for x, value in zip(odd, (np.nan, np.inf, -np.inf) * 4, strict=False):
            x[rng.integers(n_vocab)] = value
        odd[-1] = -np.inf
        for these in (rows, odd):
            for x in these:
                core.measure(x.ctypes.data, n_vocab)
            for settings in SETTINGS.values():
                settings_of_row = {**DEFAULT, **settings}
                bias = settings_of_row.pop("logit_bias", {})
                if settings_of_row["top_k"] >= n_vocab:
                    settings_of_row["top_k"] = 0
                sampler = core.RowSampler(n_vocab, bias=bias, **settings_of_row)
                for x in these:
                    alone = x.copy()  # with nothing behind it
                    token = sampler.sample(alone.ctypes.data, 7, n_rows, 0, True)
                    assert -1 <= token < n_vocab
                    pair = sampler.candidates(alone.ctypes.data)
                    assert pair is None or len(pair[0]) == len(pair[1]) > 0
                    n_rows += 1
    print("rows:", n_rows)


if __name__ == "__main__":
    main()
