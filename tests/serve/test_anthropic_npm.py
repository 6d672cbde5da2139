"""``/v1/messages`` with Anthropic's client for JavaScript, from npm."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serving import Serving, record_schema

SERVE = {"api_keys": ("secret",), "alias": "king"}
PACKAGE = "@anthropic-ai/sdk"
TOOL = {"name": "crown", "input_schema": record_schema({"enum": [7, 70]}, most=8)}
SCRIPT = """
import Anthropic from "@anthropic-ai/sdk";
const [baseURL, tool] = [process.argv[2], JSON.parse(process.argv[3])];
const client = new Anthropic({ baseURL, apiKey: "secret", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me about a king." }];
const body = { model: "any", max_tokens: 12, messages, temperature: 0.8, seed: 42 };
const whole = await client.messages.create(body);
let text = "";
const stream = client.messages.stream(body).on("text", (piece) => { text += piece; });
const streamed = await stream.finalMessage();
const asked = { ...body, max_tokens: 80, tools: [tool], tool_choice: { type: "any" } };
const call = await client.messages.create(asked);
const called = await client.messages.stream(asked).finalMessage();
const counted = await client.messages.countTokens({ model: "any", messages });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
let error = null;
try { await client.messages.create({ ...body, messages: [] }); }
catch (caught) { error = [caught.constructor.name, caught.status, caught.error.error.type]; }
console.log(JSON.stringify({ whole, text, streamed, call, called, counted, models, error }));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("npm")
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), PACKAGE]
    if subprocess.run(command, capture_output=True, timeout=300, check=False).returncode:
        pytest.skip(f"npm could not install {PACKAGE}")
    (folder / "client.mjs").write_text(SCRIPT, "utf-8")
    return folder


@pytest.mark.slow
def test_answers_streams_calls_and_errors(server: Serving, folder: Path) -> None:
    command = ["node", "client.mjs", server.url, json.dumps(TOOL)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    whole, streamed = told["whole"], told["streamed"]
    assert whole["stop_reason"] == "max_tokens" and whole["usage"]["output_tokens"] == 12
    assert streamed["content"] == whole["content"]
    assert told["text"] == whole["content"][0]["text"] != ""
    (call,) = told["call"]["content"]
    assert (call["type"], call["name"]) == ("tool_use", "crown")
    assert call["input"]["age"] in (7, 70)
    assert told["called"]["content"] == [call]
    assert told["call"]["stop_reason"] == told["called"]["stop_reason"] == "tool_use"
    counted = told["counted"]["input_tokens"]
    assert counted == whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    assert told["models"] == ["king"]
    assert told["error"] == ["BadRequestError", 400, "invalid_request_error"]
