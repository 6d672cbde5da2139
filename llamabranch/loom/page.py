"""The page's files, the policy under which a browser runs them, and a document as one HTML file."""

from __future__ import annotations

import gzip
import html
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

__all__ = ["HEADERS", "html_file", "static_file"]

_APP = files(__package__) / "app"
_KINDS = {"js": b"text/javascript", "css": b"text/css", "html": b"text/html"}
_NAME = re.compile(r"[a-z][a-z0-9_-]*\.(js|css|html)")
_IMPORT = re.compile(r'^import\s[^;]*?from\s+"\./([^"]+)";\n?', re.M)
_LINK = '<link rel="stylesheet" href="/loom/app/app.css">'
_SCRIPT = '<script type="module" src="/loom/app/main.js"></script>'
_TRUSTED = "require-trusted-types-for 'script'; trusted-types 'none'"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
) + _TRUSTED
HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


def static_file(path: str) -> tuple[bytes, bytes] | None:
    """Return a file of the page and its type, by the path of a request; None if there is none."""
    name = "index.html" if path == "/" else path.removeprefix("/loom/app/")
    found = _NAME.fullmatch(name)
    if found is None or not (_APP / name).is_file():
        return None
    return (_APP / name).read_bytes(), _KINDS[found[1]] + b"; charset=utf-8"


def _joined(name: str, seen: set[str]) -> str:
    """Return a module behind those it imports, each once, as one script."""
    if name in seen:
        return ""
    seen.add(name)
    text = (_APP / name).read_text(encoding="utf-8")
    before = "".join(_joined(other, seen) for other in _IMPORT.findall(text))
    return before + re.sub(r"^export (?=\w)", "", _IMPORT.sub("", text), flags=re.M)


def html_file(data: bytes, title: str) -> bytes:
    """Return the page with a document in it, as JSON: it needs no server and makes no request."""
    script = _joined("static.js", set()).replace("</script", "<\\/script")
    style = (_APP / "app.css").read_text(encoding="utf-8")
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in (script, style)]
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'; {_TRUSTED}"
    )
    page = (_APP / "index.html").read_text(encoding="utf-8")
    packed = b64encode(gzip.compress(data, mtime=0)).decode()
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    block = f'<script type="application/json" id="loom-data">{packed}</script>'
    page = page.replace(_LINK, f"{meta}\n<style>{style}</style>")
    page = page.replace(_SCRIPT, f'{block}\n<script type="module">{script}</script>')
    name = html.escape(title, quote=False)
    return re.sub("<title>.*?</title>", lambda _: f"<title>{name}</title>", page).encode()
