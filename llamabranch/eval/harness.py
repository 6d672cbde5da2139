"""A model for lm-evaluation-harness: ``LlamaBranchLM``. It needs ``pip install 'llamabranch[eval]'``.

Contexts, continuations and windows equal those of the harness's Hugging Face model, so the numbers can be
compared. Common beginnings of requests, such as few-shot examples and the context of all choices, are
decoded once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from typing import TYPE_CHECKING, TypedDict, cast

from typing_extensions import Unpack

from ..arguments import whole
from ..context import Context
from ..engine import Engine, Request
from ..errors import ConfigError, UnsupportedError
from ..extras import install_command
from ..loading import LoadOptions, load
from ..sampling import SamplingParams, SamplingSettings
from .scoring import Score, score

try:
    import lm_eval.models  # noqa: F401  (the registry loads its own list only while it is empty)
    from lm_eval import utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models import utils as model_utils
    from tqdm import tqdm
except ImportError:
    _MISSING = True
    if not TYPE_CHECKING:
        TemplateLM = object
else:
    _MISSING = False

_WITHOUT_EFFECT: dict[str, object] = {
    "num_beams": 1, "num_return_sequences": 1, "do_sample": None, "use_cache": True,
}  # fmt: skip


class _Ignored(TypedDict, total=False):
    """Options that lm-evaluation-harness passes, and that are not needed."""

    batch_size: object
    max_batch_size: object
    device: object


class _Options(_Ignored, LoadOptions, total=False):
    """The options of `LlamaBranchLM` by name."""


class LlamaBranchLM(TemplateLM):  # type: ignore[misc]
    """A GGUF model for ``lm_eval.simple_evaluate``, as an object or by the name "llamabranch".

    ``simple_evaluate(model=LlamaBranchLM("model.gguf"), tasks=["arc_easy"])``; by name, after
    ``from llamabranch.eval import LlamaBranchLM``: ``simple_evaluate(model="llamabranch",
    model_args="model=model.gguf")``.

    If a context with its continuation is longer than ``max_length``, its beginning is cut off, as in the
    harness's own models.

    Args:
        model: a path or name for `llamabranch.load`, or an open context, which is not closed.
        pretrained: another name of ``model``.
        max_length: the most tokens of a text; None = the trained length, or the size of the context if
            that is less.
        max_gen_toks: tokens to generate if a task does not set a limit.
        think_end_token: the end of the model's thinking; only the text after it counts.
        parse_special: whether control tokens in texts are parsed, which chat templates need.
        seed: the seed for tasks that sample without one.
        options: options of `llamabranch.load`; ``n_ctx`` (4,096) and ``n_seq_max`` (64) determine how
            many requests share a decode. ``batch_size``, ``max_batch_size`` and ``device`` are accepted
            and ignored.

    Raises:
        UnsupportedError: lm-evaluation-harness is not installed.
        ConfigError, ModelLoadError: see `llamabranch.load`.
    """

    backend = "causal"

    def __init__(
        self,
        model: str | os.PathLike[str] | Context | None = None,
        *,
        pretrained: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        think_end_token: str | None = None,
        parse_special: bool = True,
        seed: int = 0,
        **options: Unpack[_Options],
    ) -> None:
        if _MISSING:
            raise UnsupportedError(
                "LlamaBranchLM needs lm-evaluation-harness",
                hint=f"{install_command('eval')}, or pip install lm_eval",
            )
        super().__init__()
        more = dict[str, object](options)
        for name in _Ignored.__annotations__:
            more.pop(name, None)
        if isinstance(model, Context):
            if more:
                raise ConfigError(f"an open context takes no {', '.join(more)}")
            self.ctx = model
        else:
            load_options: dict[str, object] = {"n_ctx": 4096, "n_seq_max": 64, **more}
            self.ctx = load(
                model if pretrained is None else pretrained, **cast(LoadOptions, load_options)
            )
        room = self.ctx.n_ctx_seq
        usual = min(room, self.ctx.model.n_ctx_train or room)
        self.max_length = usual if max_length is None else whole("max_length", max_length, 2, room)
        self.max_gen_toks = whole("max_gen_toks", max_gen_toks, 1)
        self._think_end_token = think_end_token
        self._parse_special = parse_special
        self._seed = seed

    # -- the model ---------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        eos, eog = self.ctx.model.eos, self.ctx.model.eog_tokens
        return min(eog, default=self.prefix_token_id) if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS, or EOS."""
        return self.ctx.model.prompt_tokens("")[0]

    @property
    def tokenizer_name(self) -> str:
        """The key that distinguishes cached requests of different models."""
        model = self.ctx.model
        return f"{model.name}-{model.fingerprint[:16]}".replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's template, which the harness records; None if no template is used."""
        return self.ctx.model.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text; without a generation prompt the last message is left open."""
        messages, render = (
            [dict(message) for message in chat_history],
            self.ctx.model.apply_chat_template,
        )
        try:
            text = render(messages, add_generation_prompt=add_generation_prompt)
        except (
            ConfigError
        ):  # some templates refuse a system message; the harness's own models do the same
            messages = [message for message in messages if message["role"] != "system"]
            text = render(messages, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = messages[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)] if last in text else text

    def get_model_info(self) -> dict[str, object]:
        """Return the facts that are recorded with the results."""
        model, can = self.ctx.model, self.ctx.capabilities
        return {
            "model_num_parameters": model.n_params,
            "model_dtype": model.file_type,
            "model_revision": "",
            "model_sha": model.fingerprint,
            "kv_type": self.ctx.kv_type,
            "batch_invariant": can.batch_invariant,
            "llamabranch": metadata.version("llamabranch"),
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the tokens of a text, with one BOS if the model begins texts with it."""
        model, special = self.ctx.model, add_special_tokens is not False
        tokens = model.tokenize(string, add_special=special, parse_special=self._parse_special)
        is_double = special and model.bos is not None and tokens[:2] == [model.bos] * 2
        return tokens[1:] if is_double else tokens

    # -- requests ----------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[object, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        """Return log p of each continuation, nats, and whether the model would generate it greedily."""
        pairs = []
        for _asked, context, after in requests:
            if len(after) > self.max_length:
                message = f"a continuation has {len(after)} tokens, max_length is {self.max_length}"
                raise ConfigError(message, hint="raise max_length and n_ctx")
            window = (context + after)[-(self.max_length + 1) :]  # the last token is not an input
            pairs.append((window[: -len(after)], [after]))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm) as bar:

            def note(number: int, scores: list[Score]) -> None:
                results[number] = scores[0].logprob, scores[0].is_greedy
                arguments = requests[number][0]
                if arguments is not None:
                    self.cache_hook.add_partial("loglikelihood", arguments, results[number])
                bar.update()

            score(self.ctx, pairs, on_done=note)
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of whole texts, nats, in windows that do not overlap."""
        windows = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            rolling = utils.get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
            )
            windows.append(list(map(utils.make_disjoint_window, rolling)))
        flat = [(None, before, after) for pairs in windows for before, after in pairs]
        scores = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
        totals = [sum((next(scores)[0] for _ in pairs), 0.0) for pairs in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate after each context, up to the stop strings of its task, and return the texts."""
        work = [self._generation(str(i), *request.args) for i, request in enumerate(requests)]
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            engine = Engine(self.ctx, seed=self._seed)
            for event in engine.stream([request for request, _ in work]):
                if event.result is None or event.result.finish_reason == "cancelled":
                    continue  # cut by an interruption, which is raised next, so it must not be cached
                if event.result.error is not None:
                    raise event.result.error
                number = int(event.result.id)
                texts[number] = model_utils.postprocess_generated_text(
                    generation=event.result.text,
                    stop=work[number][1],
                    think_end_token=self._think_end_token,
                )
                context, settings = requests[number].args
                self.cache_hook.add_partial("generate_until", (context, settings), texts[number])
                bar.update()
        return texts

    def _generation(
        self, name: str, context: object, settings: object
    ) -> tuple[Request, list[str]]:
        """Return a request of the engine, and the strings that end its text."""
        if not isinstance(settings, dict):
            raise ConfigError(f"the settings of a generation must be a dict, not {settings!r:.60}")
        kwargs = model_utils.normalize_gen_kwargs(settings, self.max_gen_toks)
        eos = self.ctx.detokenize([self.eot_token_id], special=True)
        until = model_utils.handle_stop_sequences(kwargs.pop("until", None), eos=eos)
        n_new = kwargs.pop("max_gen_toks")
        room = self.max_length - n_new
        if room < 1:
            message = f"{n_new} tokens to generate do not fit: max_length is {self.max_length}"
            raise ConfigError(message, hint="raise max_length and n_ctx, or lower max_gen_toks")
        tokens = self.tok_encode(str(context))[-room:] or [self.prefix_token_id]
        # A stop string inside the model's thinking does not end the text.
        stop = () if self._think_end_token else tuple(text for text in until if text)
        request = Request(tokens, id=name, max_tokens=n_new, stop=stop, sampling=_sampling(kwargs))
        return request, until


def _sampling(kwargs: Mapping[str, object]) -> SamplingParams:
    """Return the settings of a generation: greedy, or the model's distribution with the task's settings.

    Raises:
        ConfigError: a setting has no counterpart.
    """
    settings: dict[str, object] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    known = {f.name for f in fields(SamplingParams)}
    for name, value in kwargs.items():
        own = "repeat_penalty" if name == "repetition_penalty" else name
        if own in known:
            settings[own] = value
        elif name not in _WITHOUT_EFFECT or _WITHOUT_EFFECT[name] not in (None, value):
            message = f"a task asks for {name}={value!r}, which has no counterpart here"
            raise ConfigError(message, hint="override it: gen_kwargs={...}")
    return SamplingParams().replace(**cast(SamplingSettings, settings))


if not _MISSING:
    register_model("llamabranch")(LlamaBranchLM)
