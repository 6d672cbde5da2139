"""llama_model, its vocabulary, and llama_model_quantize."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as C

from ..errors import ModelLoadError, TokenizeError
from . import core, staging
from .gguf_check import check_header
from .handle import Handle
from .interrupts import call_in_thread
from .library import address_of, logged_reason, recorded_log, supports_gpu_offload

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0",
    38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
_LOOKS_LIKE_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_PARSED = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN  # parsed in any text
_VOCAB_TYPES = {0: "none", 1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}


class ModelHandle(Handle):
    """A loaded GGUF file. The caller has checked its header.

    Args:
        path: the file.
        progress: called with 0.0 to 1.0 while it is loaded.
        use_mmap, use_mlock, load_mtp: see `Model`.
        options: other fields of llama_model_params, by llama.cpp's names.
    """

    def __init__(
        self,
        path: Path,
        progress: Callable[[float], None] | None,
        *,
        use_mmap: bool,
        use_mlock: bool,
        load_mtp: bool,
        **options: int,
    ) -> None:
        stopped = False
        fractions: SimpleQueue[float] = SimpleQueue()

        # llama.cpp calls this in the loading thread; ``progress`` is called in the caller's thread.
        def on_progress(value: float, _user_data: object) -> bool:
            if progress is not None:
                fractions.put(float(value))
            return not stopped

        def stop() -> None:
            nonlocal stopped
            stopped = True

        params = C.llama_model_default_params()
        params.load_mode = (C.LLAMA_LOAD_MODE_MMAP if use_mmap else 0) | (
            C.LLAMA_LOAD_MODE_MLOCK if use_mlock else 0
        )
        if load_mtp:
            staging.check_available()
            params.load_mtp = True
        for name, value in options.items():
            setattr(params, name, value)
        params.progress_callback = C.llama_progress_callback(on_progress)
        with recorded_log():
            loaded = self.make(
                lambda: C.llama_model_load_from_file(os.fsencode(path), params),
                C.llama_model_free,
                name="model",
                run=partial(call_in_thread, messages=fractions, on_message=progress, stop=stop),
            )
        if not loaded:
            raise ModelLoadError(f"llama.cpp cannot load {path}: {logged_reason()}")
        ptr = self.unchecked_ptr
        self.on_gpu = params.n_gpu_layers != 0 and supports_gpu_offload()
        self._vocab = C.llama_model_get_vocab(ptr)
        self.n_vocab = int(C.llama_vocab_n_tokens(self._vocab))
        name = _text(partial(C.llama_model_meta_val_str, ptr, b"general.architecture"))
        self.architecture = name or "unknown"
        self.vocab_type = _VOCAB_TYPES.get(int(C.llama_vocab_type(self._vocab)), "unknown")

    @property
    def vocab(self) -> object:
        self.ptr  # noqa: B018  (raises if the model is closed)
        return self._vocab

    # -- facts -------------------------------------------------------------------------------------

    def number(self, name: str) -> int:
        """Return llama_model_<what>() as an integer: n_params, size, n_layer, n_swa, ..."""
        return int(getattr(C, f"llama_model_{name}")(self.ptr))

    def file_type(self, value: str) -> str:
        """Return the name of a value of ``general.file_type`` in the metadata.

        If the value is missing or newer than our table, return llama.cpp's own name or guess, or else
        the number.
        """
        known = FILE_TYPES.get(int(value)) if value.isdigit() else None
        if known is not None:
            return known
        description = _text(partial(C.llama_model_desc, self.ptr))
        words = description.split(maxsplit=2)[2:]  # after architecture and size
        if words and not words[0].startswith("unknown"):
            return words[0]
        return f"type {value}" if value else "unknown"

    def metadata(self) -> dict[str, str]:
        """Return the GGUF file's scalar metadata, as llama.cpp formats it."""
        key, value = C.llama_model_meta_key_by_index, C.llama_model_meta_val_str_by_index
        return {
            _text(partial(key, self.ptr, i)): _text(partial(value, self.ptr, i))
            for i in range(C.llama_model_meta_count(self.ptr))
        }

    # -- vocabulary: the caller checks the ids -------------------------------------------------------

    def special(self, name: str) -> int | None:
        """Return the id of bos, eos, eot, nl, ... or None if the vocabulary has none."""
        token = int(getattr(C, f"llama_vocab_{name}")(self.vocab))
        return token if 0 <= token < self.n_vocab else None

    @property
    def adds_bos(self) -> bool:
        """Whether texts begin with the BOS token."""
        return bool(C.llama_vocab_get_add_bos(self.vocab))

    def is_eog(self, token: int) -> bool:
        return bool(C.llama_vocab_is_eog(self.vocab, token))

    def is_control(self, token: int) -> bool:
        return bool(C.llama_vocab_is_control(self.vocab, token))

    def control_tokens(self, template: str = "") -> dict[str, tuple[int, bool, bool]]:
        """Return what ``parse_special`` parses: by text, (id, drops spaces before, drops spaces after).

        Some files mark control tokens as user-defined, which llama.cpp parses in any text. User-defined
        tokens that look like ``<|im_start|>`` count as control tokens, as in llama.cpp's converter, and
        so do those that look like tags and occur in the chat template, such as ``<tool_call>``.
        """
        tokens = {}
        for token, attributes, text in self._marked_tokens:
            is_own = _TAG.fullmatch(text) is not None and text in template
            if text and (attributes & _PARSED or _LOOKS_LIKE_CONTROL.fullmatch(text) or is_own):
                before = bool(attributes & C.LLAMA_TOKEN_ATTR_LSTRIP)
                tokens[text] = token, before, bool(attributes & C.LLAMA_TOKEN_ATTR_RSTRIP)
        return tokens

    @cached_property
    def _marked_tokens(self) -> list[tuple[int, int, str]]:
        """The ids, attributes and texts of all tokens that are not plain text."""
        marks = _PARSED | C.LLAMA_TOKEN_ATTR_USER_DEFINED
        attributes = (C.llama_vocab_get_attr(self.vocab, token) for token in range(self.n_vocab))
        return [
            (token, marked, self.token_text(token).decode("utf-8", "replace"))
            for token, marked in enumerate(attributes)
            if marked & marks
        ]

    def token_text(self, token: int) -> bytes:
        """Return the token's text in the vocabulary (for byte-level BPE in its own byte alphabet)."""
        return C.llama_vocab_get_text(self.vocab, token) or b""

    def piece(self, token: int, special: bool) -> bytes:
        return _written(
            lambda to, n: C.llama_token_to_piece(self.vocab, token, to, n, 0, special), room=64
        )

    def pieces(self) -> list[bytes]:
        """Return all pieces; control tokens are marked as llguidance expects: 0xFF, then the text."""
        to_piece = address_of(C._lib.llama_token_to_piece)
        pieces = core.pieces(to_piece, self.vocab_address, self.n_vocab)
        if pieces is None:
            pieces = [self.piece(token, special=False) for token in range(self.n_vocab)]
        for token, piece in enumerate(pieces):
            if not piece and self.is_control(token):
                pieces[token] = b"\xff" + self.piece(token, special=True)
        return pieces

    @property
    def vocab_address(self) -> int:
        """The address of the llama_vocab, valid while the model is open."""
        return address_of(self.vocab)

    @property
    def tokenize_address(self) -> int:
        """The address of the function llama_tokenize."""
        return address_of(C._lib.llama_tokenize)

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        room = len(text) + 8
        while True:
            tokens = np.empty(room, dtype=np.int32)
            n = C.llama_tokenize(
                self.vocab,
                text,
                len(text),
                tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
                room,
                add_special,
                parse_special,
            )
            if n >= 0:
                return [int(t) for t in tokens[:n]]
            if -n <= room:
                raise TokenizeError("the text has too many tokens for llama.cpp")
            room = -n

    def detokenize(self, tokens: Sequence[int], special: bool) -> bytes:
        """Return the text of ``tokens``.

        llama_detokenize drops spaces before punctuation in some byte-level vocabularies ("clean up
        spaces"), so for those we join the pieces. Other vocabularies need it, because it drops the
        space that the tokenizer puts before a text.
        """
        if self.vocab_type == "bpe":
            return b"".join(self.piece(token, special) for token in tokens)
        ids = np.asarray(tokens, dtype=np.int32)
        address = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        return _written(
            lambda to, n: C.llama_detokenize(self.vocab, address, len(ids), to, n, False, special),
            room=8 * len(ids) + 64,
        )

    # -- chat --------------------------------------------------------------------------------------

    def chat_template(self) -> str | None:
        text = C.llama_model_chat_template(self.ptr, None)
        return None if text is None else text.decode("utf-8", "replace")

    @staticmethod
    def chat_template_names() -> frozenset[str]:
        """Return the names of llama.cpp's own chat templates, which it accepts instead of a source."""
        names = (ctypes.c_char_p * C.llama_chat_builtin_templates(None, 0))()
        C.llama_chat_builtin_templates(names, len(names))
        return frozenset(name.decode() for name in names if name is not None)

    def apply_chat_template(
        self, template: str, messages: Sequence[tuple[str, str]], add_generation_prompt: bool
    ) -> str | None:
        """Return the rendered conversation, or None if llama.cpp has no such template."""
        encoded = [(role.encode(), content.encode()) for role, content in messages]
        chat = (C.llama_chat_message * max(1, len(encoded)))(
            *(C.llama_chat_message(role=role, content=content) for role, content in encoded)
        )
        room = 1024 + 2 * sum(len(r) + len(c) for r, c in encoded)
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = C.llama_chat_apply_template(
                template.encode(), chat, len(encoded), add_generation_prompt, buffer, room
            )
            if n < 0:
                return None
            if n <= room:
                return buffer.raw[:n].decode("utf-8", "replace")
            room = n


def quantize(source: Path, path: Path, file_type: str) -> None:
    """Write the model of ``source`` to ``path`` with weights of ``file_type``, a name such as "Q8_0".

    Quantized weights are quantized again, so the losses add up.

    Raises:
        ModelLoadError: ``source`` is not a model that llama.cpp can read, or ``path`` cannot be written.
    """
    check_header(source)
    params = C.llama_model_quantize_default_params()
    params.ftype = next(number for number, name in FILE_TYPES.items() if name == file_type)
    params.allow_requantize = True
    names = os.fsencode(source), os.fsencode(path)
    with recorded_log():
        failed = call_in_thread(lambda: bool(C.llama_model_quantize(*names, params)))
    if failed:
        raise ModelLoadError(
            f"llama.cpp cannot make {path.name} from {source.name}: {logged_reason()}"
        )


def _written(write: Callable[[Any, int], int], room: int) -> bytes:
    """Return what ``write`` writes into a buffer of ``room`` bytes, or of n bytes if it returns -n."""
    while True:
        buffer = ctypes.create_string_buffer(room)
        n = write(buffer, room)
        if n >= 0:
            return buffer.raw[:n]
        room = -n


def _text(read: Callable[[Any, int], int]) -> str:
    """Return the text that ``read`` writes into a buffer, or "" if it writes nothing."""
    buffer = ctypes.create_string_buffer(1024)
    size = read(buffer, len(buffer))
    if size >= len(buffer):
        buffer = ctypes.create_string_buffer(size + 1)
        read(buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if size >= 0 else ""
