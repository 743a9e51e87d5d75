"""Record in every Chinese page the digest of the English page that it translates.

Run `python docs/translations.py [PAGE...]` after a translation was updated: without pages, for all.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Write the digests of the named Chinese pages, or of all."""
    pages = [Path(name) for name in sys.argv[1:]]
    for page in pages or sorted([*ROOT.glob("README.zh.md"), *ROOT.glob("docs/*.zh.md")]):
        original = page.with_name(page.name.replace(".zh.md", ".md"))
        digest = hashlib.sha256(original.read_bytes()).hexdigest()[:16]
        line = f"<!-- translates {original.name} {digest} -->"
        text = re.sub(
            r"^<!-- translates .*-->$", line, page.read_text(encoding="utf-8"), flags=re.M
        )
        page.write_text(text, encoding="utf-8")
        print(f"{page.name}: {digest}")


if __name__ == "__main__":
    main()
