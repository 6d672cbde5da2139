"""A conversation with a retry, an edit and a return to an earlier branch: tokens that are evaluated.

python -m benchmarks.conversation [--target MODEL.gguf]
"""

from __future__ import annotations

import llamabranch as lb

from .report import Settings, emit, number, parser, table, title

TURNS = (
    "Name three rivers in Europe.", "Which of them is the longest?", "Name a city on it.",
    "What can one eat there?", "Suggest a walk of one hour.", "Say it all in one sentence.",
)  # fmt: skip


def main() -> None:
    """Hold the conversation; compare with each prompt and answer evaluated anew."""
    described = parser("a conversation that branches", tokens=48, target="smollm2-135m:Q8_0")
    settings = Settings.of(described.parse_args())
    turns = TURNS[:2] if settings.quick else TURNS
    anew = n_answers = 0

    def take(answer: lb.chat.Answer) -> None:
        nonlocal anew, n_answers
        answer.finish()
        anew += len(answer.prompt) + len(answer.tokens)
        n_answers += 1

    with (
        settings.context(settings.target, n_ctx=4096) as ctx,
        lb.Chat(ctx, seed=1, temperature=0.5, max_tokens=settings.tokens) as chat,
    ):
        for turn in turns:
            take(chat.send(turn))
        take(chat.retry())
        take(chat.edit(2, "Which of them flows through the most countries?"))
        take(chat.send("Name its source."))
        chat.switch(1)
        take(chat.send("Thank you. One more walk, please."))
        evaluated = chat.stats.prompt_tokens + chat.stats.generated_tokens
        rows = [
            ("Chat", f"{evaluated:,}"),
            ("each prompt and answer anew", f"{anew:,}"),
            ("times as many", number(anew / evaluated, 1)),
        ]
        caption = f"A conversation of {n_answers} answers on 3 branches, {title(ctx.model)}"
        table(caption, ("", "tokens evaluated"), rows)
        results = {"evaluated": evaluated, "anew": anew, "answers": n_answers}
        emit("conversation", settings, {"target": ctx.model}, results)


if __name__ == "__main__":
    main()
