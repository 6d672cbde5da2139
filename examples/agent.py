"""An agent that calls Python functions, and what its run cost. A larger model does better.

python examples/agent.py [MODEL]
"""

import asyncio
import sys

import llamabranch as lb


def weather(city: str) -> str:
    """Tell the weather of a city."""
    known = {"Oslo": "-5 °C, snow", "Lima": "19 °C, fog"}
    if city not in known:
        raise lb.errors.ToolError(f"no weather of {city}; there are {', '.join(known)}")
    return known[city]


async def distance(start: str, end: str) -> float:
    """Tell the distance between two cities, in km.

    Args:
        start: where the way begins.
        end: where it ends.
    """
    await asyncio.sleep(0.01)  # a request to a server, for instance
    return 11_500.0 if {start, end} == {"Oslo", "Lima"} else 0.0


def main() -> None:
    name = sys.argv[1] if sys.argv[1:] else lb.hub.default_model()
    template = "chatml" if name == lb.hub.BUNDLED_TARGET else None  # which has no template
    with lb.load(name, n_ctx=2048, chat_template=template) as ctx:
        agent = lb.Agent(
            ctx,
            "Answer in one sentence.",
            tools=[weather, distance],
            tool_choice="weather",  # in the first turn; without it the model decides
            max_tokens=200,
            temperature=0,
            seed=1,
        )
        for step in agent.stream("Do I need a coat in Oslo?"):
            if step.kind in ("call", "result"):
                print(f"\n[{step.kind}] {step.name} {step.text}")
            elif step.kind == "text":
                print(step.text, end="", flush=True)
            elif step.report is not None:
                report = step.report
        print(f"\n\nended with {report.finish_reason!r} after {len(report.calls)} calls")
        print(f"Tokens read: {report.evaluated}, from the cache: {report.cached}")
        print(f"Tokens generated: {report.generated}, read again: {report.reread}")


if __name__ == "__main__":
    main()
