"""Three questions to one document, each in a fork: the document is read once, each answer is an object.

python examples/agents_document.py [MODEL]
"""

import sys
from dataclasses import dataclass

import llamabranch as lb

CONTRACT = """Contract between Harbour Ltd (the lender) and Mill Co (the borrower).
1. The lender lends a crane from 1 March 2027 to 30 November 2027.
2. The borrower pays 900 euros a month, on the first day of each month.
3. The borrower insures the crane. Storm damage is at the borrower's risk.
4. Either side may end the contract with notice of 30 days."""


@dataclass
class Finding:
    quote: str
    meaning: str


def find(word: str) -> str:
    """Return the lines of the contract that hold a word."""
    lines = [line for line in CONTRACT.splitlines() if word.lower() in line.lower()]
    return "\n".join(lines) or "no line holds it"


def answer(report: lb.agents.Report[Finding]) -> object:
    """Return the answer, or the reason if it is missing: a small model may use up its tokens first."""
    return report.parsed_or(f"no answer: it ended with {report.finish_reason!r}")


def main() -> None:
    name = sys.argv[1] if sys.argv[1:] else lb.hub.default_model()
    template = "chatml" if name == lb.hub.BUNDLED_TARGET else None  # which has no template
    with lb.load(name, n_ctx=4096, chat_template=template) as ctx:
        trunk = [("system", "Answer from the contract, in one sentence."), ("user", CONTRACT)]
        reader = lb.Agent(
            ctx, trunk, tools=[find], output=Finding, max_tokens=300, temperature=0, seed=1
        )
        questions = ["When does it end?", "Who pays?", "What is the risk?"]
        reports = reader.run(questions)
        for question, report in zip(questions, reports, strict=True):
            calls = " ".join(f"{call.name}({call.arguments})" for call in report.calls)
            print(f"{question} {calls}\n  {answer(report)}")
        notes = "\n".join(report.text for report in reports)
        summary = reader.run(f"Summarise these notes:\n{notes}")  # the contract is not read again
        print(f"\nSummary\n  {answer(summary)}\n")
        reports.append(summary)
        print(f"Tokens of all prompts: {sum(s.evaluated + s.cached for s in reports)}")
        print(f"Read: {sum(s.evaluated for s in reports)}")


if __name__ == "__main__":
    main()
