"""Constrain the generated text with a GBNF grammar, and with a JSON schema."""

import llamabranch as lb

LIST = r"""
root ::= item item item
item ::= "\n- the " word " " word
word ::= [a-z]{3,7}
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "string", "pattern": "^[1-9][0-9]$"},
        "kind": {"enum": ["king", "fairy", "wolf"]},
    },
    "required": ["name", "age", "kind"],
}


def main() -> None:
    with lb.load() as ctx:
        prompt = "In the wood lived three creatures:"
        print(prompt + ctx.complete(prompt, grammar=LIST, max_tokens=60, seed=1).text)

        prompt = "The hero of the tale, as a record: "
        answer = ctx.complete(prompt, json_schema=SCHEMA, max_tokens=80, seed=2)
        print("\n" + prompt + answer.text)
        print(f"parsed: {answer.parsed}")


if __name__ == "__main__":
    main()
