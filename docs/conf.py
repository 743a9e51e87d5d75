"""Configuration of the documentation site, built by `nox -s docs` with Sphinx, MyST and Furo.

The source folder is the repository, so that links between documents work here and in the
repository alike. The site loads nothing from the network: fonts are those of the system, formulas
are MathML, and the search runs in the browser.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

project = "msrl"
copyright = "the msrl authors"
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "benchmarks/README.md",
    "examples/**/README.md",
    "templates/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests"]
extensions = ["myst_parser"]
nitpicky = True

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

html_theme = "furo"
html_title = "msrl"
html_static_path = ["static"]
html_css_files = ["print.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_search_language = "en_zh"
html_math_renderer = "mathml"
html_theme_options = {"top_of_page_buttons": []}

_CELL = re.compile(r"<td>.*?</td>", re.DOTALL)
_LITERAL = re.compile(r'(?<=<span class="pre">)[^<]*')
_END_OF_WORD = re.compile(r"[._/=](?=\w)")
_MAIN = re.compile(r'<article role="main".*?</article>', re.DOTALL)
_SYMBOLS = re.compile(r"[一-鿿]")


class EnglishAndChinese(SearchEnglish):
    """Search index of English words and of pairs of Chinese characters.

    Chinese has no spaces between words. The index has all pairs of neighboring characters, and a
    query is split into pairs, all of which a page must have.
    """

    lang = "en_zh"
    language_name = "English"  # names the stemmer in the browser, too
    js_splitter_code = """
function splitQuery(query) {
  const words = [];
  const runs = /[\\u4e00-\\u9fff]+|[\\p{Letter}\\p{Number}_\\p{Emoji_Presentation}]+/gu;
  for (const run of query.match(runs) || []) {
    if (!/^[\\u4e00-\\u9fff]/.test(run) || run.length === 1) { words.push(run); continue; }
    for (let i = 0; i < run.length; i += 2) words.push(run.slice(i, i + 2));
  }
  return words;
}
"""

    def split(self, input: str) -> list[str]:
        """Return English words, and pairs and single characters of Chinese text."""
        words = super().split(re.sub(r"[一-鿿]+", " ", input))
        for run in re.findall(r"[一-鿿]+", input):
            words += [run[i : i + 2] for i in range(len(run) - 1)] + list(run)
        return words

    def word_filter(self, stemmed_word: str) -> bool:
        """Return True for words to index: all Chinese ones, and English ones as usual."""
        return bool(_SYMBOLS.match(stemmed_word)) or super().word_filter(stemmed_word)


def inline_math(self: Any, node: nodes.math) -> None:
    """Write a formula of a line as MathML."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_math(self: Any, node: nodes.math_block) -> None:
    """Write a formula of a block as MathML."""
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def set_language(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Declare the language of Chinese pages, for fonts and screen readers."""
    if page.endswith(".zh"):
        context["language"] = "zh-CN"


def break_keys(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Let keys in tables wrap after a dot, underscore, slash or equals sign only."""
    context["body"] = _CELL.sub(
        lambda cell: _LITERAL.sub(lambda code: _END_OF_WORD.sub(r"\g<0><wbr>", code[0]), cell[0]),
        context.get("body", ""),
    )


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write the texts of all pages as a script, which the search reads from disk."""
    if error is None and app.builder.format == "html":
        pages = {name: Path(app.outdir, f"{name}.html") for name in sorted(app.env.found_docs)}
        texts = {name: _MAIN.search(path.read_text("utf-8")) for name, path in pages.items()}
        found = {name: match[0] for name, match in texts.items() if match}
        script = f"window.siteTexts = {json.dumps(found)};\n"
        Path(app.outdir, "_static", "texts.js").write_text(script, encoding="utf-8")


def write_entry(app: Sphinx, error: Exception | None) -> None:
    """Write an index.html that leads from the top folder to the first page."""
    if error is None and app.builder.format == "html":
        target = f"{root_doc}.html"
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">'
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Register the search language, the formulas and the hooks."""
    app.add_search_language(EnglishAndChinese)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("html-page-context", set_language)
    app.connect("html-page-context", break_keys)
    app.connect("build-finished", write_entry)
    app.connect("build-finished", write_texts)
