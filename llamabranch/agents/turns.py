"""The prompts and the grammars of an agent's turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from ..errors import LlamaBranchError, UnsupportedError
from ..model import Model
from ..model.text import n_common
from ..model.thoughts import ThinkingChoice, thinking_variables
from ..model.tools import Tools, conversation
from ..sampling.grammar import Grammar, turn_grammar

_CALL = re.compile(r'"name"\s*:\s*"[^"]*"\s*,?\s*"(arguments|parameters)"')
_LONG = 1000  # characters of a message that is rendered again after each turn
Messages = Sequence[Mapping[str, object]]


class Turns:
    """The prompts and grammars of an agent's turns.

    Args:
        model: its model.
        tools: the tools of the first turn; in later turns the model decides whether to call.
        thinking: see `Agent`.
    """

    def __init__(self, model: Model, tools: Tools, thinking: ThinkingChoice) -> None:
        self.model, self.form, self.first = model, model.turn_format, tools
        choice = "auto" if tools.is_used else "none"
        self.others = Tools(tools.given, choice, self.form, parallel=tools.parallel)
        self._variables = thinking_variables(self.form, thinking)

    # -- grammars ----------------------------------------------------------------------------------

    @cached_property
    def forced(self) -> Grammar | None:
        """The grammar of a first turn that has to call a function; None if it need not."""
        return turn_grammar(self.model, self.first) if self.first.forced else None

    @cached_property
    def free(self) -> Grammar | None:
        """The grammar of a turn that may call functions; None if the template's form cannot have one."""
        if not self.others.is_used:
            return None
        try:
            return turn_grammar(self.model, self.others)
        except UnsupportedError:
            return None

    def looks_like_call(self, text: str) -> bool:
        """Return whether a text without a complete call has the beginning of one, or a broken one."""
        opening = re.split(r"\s", self.form.form.opening.strip())[0]
        is_opened = bool(opening.strip("{[\"'")) and opening in text
        return is_opened or _CALL.search(text) is not None

    # -- prompts -----------------------------------------------------------------------------------

    def prompt(
        self, messages: Messages, *, answers: bool = True, has_tools: bool = True
    ) -> list[int]:
        """Return the tokens of a conversation.

        Args:
            messages: all of it.
            answers: whether an answer begins after it.
            has_tools: False leaves out the descriptions of the tools.

        Raises:
            LlamaBranchError: the template refuses it.
        """
        tools = self.first if has_tools else Tools(())
        talk = conversation(
            self.model, messages, tools, self._variables, continues=False, generates=answers
        )
        return talk.tokens(self.model)

    @cached_property
    def _n_begun(self) -> int:
        """How many tokens the template writes where an answer begins."""
        question = [{"role": "user", "content": "x"}]
        prompt = self.prompt(question)
        return len(prompt) - n_common(prompt, self.prompt(question, answers=False))

    def following(
        self, own: Sequence[int], before: Messages, new: Messages, *, is_turn: bool
    ) -> list[int]:
        """Return the prompt after an answer.

        The agent's own tokens stay as the model wrote them. After them come the tokens that the
        template writes after the answer when it renders the whole conversation. If the template now
        writes the text before the answer differently, the whole rendering is used.

        Args:
            own: the tokens up to the end of the answer, without the EOG token.
            before: the conversation up to that answer, which it ends with.
            new: the messages after it.
            is_turn: whether it is within a turn of the user. Templates then write earlier messages
                as before, so long ones are shortened here, because rendering a document takes long.
                After a message of the user they may write the answer without its thought.

        Raises:
            LlamaBranchError: the template refuses the conversation.
        """
        known: Messages = before
        if is_turn:
            known = [*map(_short, before[:-1]), before[-1]]
        others = [{**message, "content": f"x{message['content']}"} for message in new]
        try:
            whole, other = self.prompt([*known, *new]), self.prompt([*known, *others])
            asked = self.prompt(known[:-1])
            head = whole if is_turn else self.prompt(known, answers=False)
            start = len(asked) - self._n_begun  # of what the template writes before an answer
        except LlamaBranchError:  # some templates take no conversation that ends with an answer
            return self.prompt([*before, *new])
        eog, n = self.model.eog_tokens, n_common(whole, other)
        end = next((i for i in range(n - 1, -1, -1) if whole[i] in eog), -1)  # of the answer
        if n_common(whole, asked) >= start and start <= end < n_common(whole, head):
            return [*own, *whole[end:]]
        return self.prompt([*before, *new])


def _short(message: Mapping[str, object]) -> Mapping[str, object]:
    """Return a message without the middle of a long text."""
    text = message.get("content")
    if not isinstance(text, str) or len(text) <= _LONG:
        return message
    return {**message, "content": f"{text[: _LONG // 4]} {text[-_LONG // 4 :]}"}
