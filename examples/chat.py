"""A conversation of ten turns with a retry and an edit: only new tokens are processed.

The bundled target was not trained on conversations. So the template only joins the messages, and two
people tell a tale in turn.
"""

import llamabranch as lb

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
OPENING = "Once upon a time there was a king who had a clever daughter."
LINES = [f"On day {day}, the {who} asked:" for day in range(1, 6) for who in ("king", "fox")]


def converse(chat: lb.Chat) -> int:
    """Hold the conversation; return the tokens of all prompts together."""
    answers = [chat.send(line).finish() for line in (OPENING, *LINES[:5])]
    answers.append(chat.retry().finish())
    answers.append(chat.edit(3, "On day 1, the bear asked:").finish())
    answers += [chat.send(line).finish() for line in LINES[5:]]
    return sum(len(answer.prompt) for answer in answers)


def main() -> None:
    with (
        lb.load("tale-target", n_seq_max=32, chat_template=TEMPLATE) as ctx,
        lb.Chat(ctx, seed=7, max_tokens=24) as chat,
    ):
        n_prompt = converse(chat)
        for message in chat.messages:
            print(str(message["content"]).strip())
        print()
        print(chat.tree())
        print(f"  Tokens of all prompts: {n_prompt}")
        print(f"  Read: {n_prompt - chat.stats.cached}")


if __name__ == "__main__":
    main()
