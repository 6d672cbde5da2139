"""The door in Python, without a server: a streamed answer, and one as JSON.

python examples/door_python.py [MODEL]
"""

import sys
from typing import Literal

from pydantic import BaseModel

import llamabranch as lb


class Fox(BaseModel):
    is_animal: bool
    colour: Literal["red", "blue"]


def main() -> None:
    name = sys.argv[1] if sys.argv[1:] else lb.hub.default_model()
    template = "chatml" if name == lb.hub.BUNDLED_TARGET else None  # which has no template
    with lb.load(name, chat_template=template) as ctx:
        question = [("user", "What is a fox? Answer in one sentence.")]
        for event in ctx.chat(question, max_tokens=60, stream=True):
            print(event.text, end="", flush=True)
        answer = ctx.chat(question, max_tokens=60, json_schema=Fox, temperature=0)
        print(f"\n{answer.parsed!r}")


if __name__ == "__main__":
    main()
