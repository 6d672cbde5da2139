"""The door for Anthropic's client: a streamed answer, and one as JSON.

llamabranch serve -m smollm2-135m:Q8_0
python examples/door_anthropic.py [http://127.0.0.1:8080]
"""

import sys
from typing import Literal

from anthropic import Anthropic
from anthropic.types import MessageParam as Message
from pydantic import BaseModel

QUESTION: Message = {"role": "user", "content": "What is a fox? Answer in one sentence."}


class Fox(BaseModel):
    is_animal: bool
    colour: Literal["red", "blue"]


def main() -> None:
    server = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8080"
    client = Anthropic(base_url=server, api_key="none")
    with client.messages.stream(model="any", messages=[QUESTION], max_tokens=60) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    answer = client.messages.parse(
        model="any", messages=[QUESTION], max_tokens=60, output_format=Fox
    )
    print(f"\n{answer.parsed_output!r}")


if __name__ == "__main__":
    main()
