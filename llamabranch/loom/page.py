"""The page's own files, and the exported HTML file."""

from __future__ import annotations

import gzip
import html
import re
from base64 import b64encode
from hashlib import sha256

from ..serve.page import TRUSTED, Files

FILES = Files(
    "llamabranch.loom", "llamabranch.serve", pages={"/": "index.html", "/view": "view.html"}
)
_IMPORT = re.compile(r'^import\s[^;]*?from\s+"\./([^"]+)";\n?', re.M)
_STYLE = re.compile(r'<link rel="stylesheet" href="/app/(.*)">\n')
_SCRIPT = '<script type="module" src="/app/main.js"></script>'


def _joined(name: str, seen: set[str]) -> str:
    """Return a module and those it imports as one script, imported ones first and each once."""
    if name in seen:
        return ""
    seen.add(name)
    text = FILES.read(name)
    before = "".join(_joined(other, seen) for other in _IMPORT.findall(text))
    return before + re.sub(r"^export (?=\w)", "", _IMPORT.sub("", text), flags=re.M)


def html_file(data: bytes, title: str) -> bytes:
    """Return the page as one HTML file that contains a document (JSON). It makes no request."""
    script = _joined("static.js", set()).replace("</script", "<\\/script")
    page = FILES.read("index.html")
    style = "".join(map(FILES.read, _STYLE.findall(page)))
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in (script, style)]
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'; {TRUSTED}"
    )
    packed = b64encode(gzip.compress(data, mtime=0)).decode()
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    block = f'<script type="application/json" id="loom-data">{packed}</script>'
    head = f'{meta}\n<style>{style}</style>\n{block}\n<script type="module">{script}</script>'
    page = _STYLE.sub("", page).replace(_SCRIPT, head)
    name = html.escape(title, quote=False)
    return re.sub("<title>.*?</title>", lambda _: f"<title>{name}</title>", page).encode()
