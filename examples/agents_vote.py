"""Five samples of an agent that calculates, and a vote; then another question to the first sample.

python examples/agents_vote.py [MODEL]
"""

import asyncio
import operator
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import llamabranch as lb

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass(frozen=True)
class Answer:
    minutes: int


def calculate(left: float, sign: Literal["+", "-", "*", "/"], right: float) -> float:
    """Calculate with two numbers."""
    if sign == "/" and right == 0:
        raise lb.errors.ToolError("one cannot divide by 0")
    return round(float(OPERATIONS[sign](left, right)), 6)


async def solve(ctx: lb.Context) -> None:
    """Ask, count the votes, and ask again."""
    async with lb.AsyncEngine(ctx) as engine:
        solver = lb.Agent(
            engine, "Calculate with the function. Answer in one sentence.", tools=[calculate],
            output=Answer, tool_choice="required", parallel_tool_calls=False, max_turns=4, max_tokens=240,
            temperature=0.8, seed=1,
        )  # fmt: skip
        question = "A train goes 2 km in a minute. How many minutes does it take for 90 km?"
        report = await solver.arun(question, n=5)  # five forks with different seeds
        votes = Counter(choice.parsed_or(None) for choice in report.choices)
        for answer, n in votes.most_common():
            print(f"{n} of 5: {answer or 'no answer'}")
        print(f"Tokens read: {sum(choice.evaluated for choice in report.choices)}")
        async for step in solver.astream("And back?", history=report):  # continues the first sample
            if step.kind in ("call", "result"):
                print(step.kind, step.name, step.text)
            elif step.report is not None:
                print(step.report.parsed_or(f"no answer: it ended with {step.text!r}"))


def main() -> None:
    name = sys.argv[1] if sys.argv[1:] else lb.hub.default_model()
    template = "chatml" if name == lb.hub.BUNDLED_TARGET else None  # which has no template
    with lb.load(name, n_ctx=4096, chat_template=template) as ctx:
        asyncio.run(solve(ctx))


if __name__ == "__main__":
    main()
