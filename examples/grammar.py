"""Constrain the generated text with a GBNF grammar, and with a JSON schema."""

import json

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
        with lb.Branch.start(ctx, prompt, grammar=LIST, temperature=0.8, seed=1) as branch:
            print(prompt + "".join(token.text for token in branch.generate(max_tokens=60)))

        schema = lb.Grammar.from_json_schema(SCHEMA)
        prompt = "The hero of the tale, as a record: "
        with lb.Branch.start(ctx, prompt, grammar=schema, temperature=0.8, seed=2) as branch:
            answer = "".join(token.text for token in branch.generate(max_tokens=80))
        print("\n" + prompt + answer)
        print(f"parsed: {json.loads(answer)}")


if __name__ == "__main__":
    main()
