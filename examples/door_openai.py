"""The door for OpenAI's client: a streamed answer, and one as JSON.

llamabranch serve -m smollm2-135m:Q8_0
python examples/door_openai.py [http://127.0.0.1:8080]
"""

import sys
from typing import Literal

from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam as Message
from pydantic import BaseModel

QUESTION: Message = {"role": "user", "content": "What is a fox? Answer in one sentence."}


class Fox(BaseModel):
    is_animal: bool
    colour: Literal["red", "blue"]


def main() -> None:
    server = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8080"
    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    chat = client.chat.completions
    for chunk in chat.create(model="any", messages=[QUESTION], max_tokens=60, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    answer = chat.parse(model="any", messages=[QUESTION], max_tokens=60, response_format=Fox)
    print(f"\n{answer.choices[0].message.parsed!r}")


if __name__ == "__main__":
    main()
