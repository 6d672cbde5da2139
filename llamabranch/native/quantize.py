"""llama_model_quantize: the weights of a GGUF file in another type."""

from __future__ import annotations

from pathlib import Path

from llama_cpp import llama_cpp as C

from ..errors import ModelLoadError
from .gguf_check import check_header
from .library import logged_reason, recorded_log
from .model import FILE_TYPES
from .thread_call import call_in_thread

__all__ = ["quantize"]


def quantize(source: Path, path: Path, file_type: str) -> None:
    """Write the model of ``source`` to ``path`` with weights of ``file_type``, a name such as "Q8_0".

    Quantized weights are quantized again: what they lack of the original does not come back.

    Raises:
        ModelLoadError: ``source`` is no model that llama.cpp reads, or ``path`` cannot be written.
    """
    check_header(source)
    params = C.llama_model_quantize_default_params()
    params.ftype = next(number for number, name in FILE_TYPES.items() if name == file_type)
    params.allow_requantize = True
    names = str(source).encode(), str(path).encode()
    with recorded_log():
        failed = call_in_thread(lambda: bool(C.llama_model_quantize(*names, params)))
    if failed:
        raise ModelLoadError(
            f"llama.cpp cannot make {path.name} from {source.name}: {logged_reason()}"
        )
