"""Random JSON schemas with numbers that floats cannot represent, in a process that they may crash.

``python schema_fuzz.py SEED N`` draws N schemas, and some texts of each accepted one. It prints how many
were accepted and refused, and which text broke its schema. jsonschema judges, with decimals instead of
floats.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, setcontext
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

import llamabranch as lb
from llamabranch.errors import GrammarError
from llamabranch.sampling.grammar.guidance import Matcher

sys.path.insert(0, str(Path(__file__).parents[1]))
import toys

N_TEXTS, MOST_TOKENS = 2, 400
_EDGES = [
    0,
    1,
    9,
    99,
    *(2**n for n in (31, 32, 53, 63, 64)),
    *(10**n for n in (1, 15, 18, 19, 22, 30)),
]
_ODD = [
    "0.1", "1e-7", "1e-20", "1e-300", "1e15", "1e22", "1e300", "1.5", "123456789.12345679", "-0.0",
    "-1e22", "0.30000000000000004", "9007199254740993.0", "1E5", "4.9e-324", "2.5e-9", "0.000001",
    "1234567890.5",
]  # fmt: skip


def _number(rng: random.Random) -> str:
    """Return a number as JSON: near a limit, unusual, or arbitrary."""
    way = rng.random()
    if way < 0.5:
        return str(rng.choice([-1, 1]) * (rng.choice(_EDGES) + rng.randint(-2, 2)))
    if way < 0.75:
        return rng.choice(_ODD)
    if way < 0.9:
        return str(rng.randint(-1000, 1000))
    return repr(rng.uniform(-1, 1) * 10.0 ** rng.randint(-12, 20))


def _numeric(rng: random.Random) -> str:
    """Return a schema of a number."""
    keys = []
    if rng.random() < 0.8:
        keys.append(f'"type": {rng.choice(_TYPES)}')
    way = rng.random()
    if way < 0.25:
        keys.append(f'"const": {_number(rng)}')
    elif way < 0.5:
        values = [_number(rng) for _ in range(rng.randint(1, 4))] + ['"a"'] * (rng.random() < 0.2)
        keys.append(f'"enum": [{", ".join(values)}]')
    if way > 0.4:
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if rng.random() < 0.4:
                keys.append(f'"{name}": {_number(rng)}')
        if rng.random() < 0.2:
            keys.append(f'"multipleOf": {_number(rng).lstrip("-")}')
    return f"{{{', '.join(keys)}}}"


_TYPES = ['"integer"', '"integer"', '"number"', '["integer", "null"]', '["number", "string"]']


def _schema(rng: random.Random, depth: int = 2) -> str:
    """Return a schema with numbers in any place."""
    way = rng.random()
    if depth == 0 or way < 0.35:
        return _numeric(rng)
    inner = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if way < 0.55:
        names = [f"p{i}" for i in range(len(inner))]
        pairs = ", ".join(f'"{n}": {schema}' for n, schema in zip(names, inner, strict=True))
        required = json.dumps([n for n in names if rng.random() < 0.6])
        return f'{{"type": "object", "properties": {{{pairs}}}, "required": {required}}}'
    if way < 0.7:
        counts = f', "minItems": {rng.randint(0, 2)}, "maxItems": {rng.randint(2, 4)}'
        unique = ', "uniqueItems": true' if rng.random() < 0.2 else ""
        return f'{{"type": "array", "items": {inner[0]}{counts}{unique}}}'
    if way < 0.78:
        return f'{{"type": "array", "prefixItems": [{", ".join(inner)}], "maxItems": {len(inner)}}}'
    if way < 0.9:
        return f'{{"{rng.choice(["anyOf", "anyOf", "allOf"])}": [{", ".join(inner)}]}}'
    return '{"$ref": "#/$defs/a"}'


def _text(matcher: Matcher, model: lb.Model, rng: random.Random) -> str | None:
    """Return a random text of a grammar; None if it gets too long."""
    text = b""
    for _ in range(MOST_TOKENS):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits).tolist()))
        if model.is_eog(token):
            return text.decode("utf-8")
        matcher.accept(token)
        text += model.piece(token)
    return None


def _is_integer(_: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite() and value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


_Judge = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


def main(seed: int, n: int) -> None:
    setcontext(Context(prec=800, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[]))
    rng = random.Random(seed)
    counts = {"taken": 0, "refused": 0, "texts": 0}
    broken: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = lb.Model(toys.write_llama(Path(folder) / "bytes.gguf", vocab="bytes"))
        for _ in range(n):
            source = f'{{"$defs": {{"a": {_numeric(rng)}}}, {_schema(rng).removeprefix("{")}'
            try:
                grammar = lb.Grammar.from_json_schema(source)
                matchers = [grammar.start(model) for _ in range(N_TEXTS)]
            except GrammarError:
                counts["refused"] += 1
                continue
            counts["taken"] += 1
            judge = _Judge(json.loads(source, parse_float=Decimal))
            for matcher in matchers:
                assert isinstance(matcher, Matcher)
                try:
                    text = _text(matcher, model, rng)
                except GrammarError:  # too complex, with a typed error
                    continue
                if text is None:
                    continue
                counts["texts"] += 1
                value = json.loads(text, parse_float=Decimal)
                is_valid = judge.is_valid(value)
                if not is_valid:
                    broken.append({"schema": source, "text": text})
        model.close()
    print(json.dumps({**counts, "broken": broken[:5], "n_broken": len(broken)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
