"""Puts the README and its like on the site, for mkdocs (``hooks:`` of mkdocs.yml).

They lie beside the folder of the pages, so their links are made relative to it. A link
from a page to a file that is not a page, such as an example, becomes plain text. In
place of ``<!-- data -->`` stand the data files that no plot shows.
"""

import json
import pathlib
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
SHOWN = {
    "experts",
    "guarantees",
    "links",
    "planning",
    "published",
    "when",
}  # by plots and tables
DATA = "<!-- data -->"
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")

# Blocks of code, which break nowhere, and code within text.
_CODE = re.compile(r"<pre.*?</pre>|<code>[^<]*</code>", re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that lie outside the folder."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=moved(text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Takes links out of a page that lead to no page."""
    return _LINK.sub(_without_source, markdown.replace(DATA, further_data()))


def on_page_content(html: str, **_: Any) -> str:
    """Keeps an option such as ``--out`` whole, and takes backslashes from pipes."""
    return _CODE.sub(_with_whole_options, html)


def moved(text: str) -> str:
    """The text of a file beside the folder, with links as within the folder."""
    for page, source in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text.replace("](docs/", "](")


def further_data(folder: pathlib.Path = ROOT / "docs" / "data") -> str:
    """A table of what else was measured; '' while there is nothing.

    A data file tells its ``command``, and its figures under ``summary`` or beside it.
    """
    rows: list[str] = []
    for file in sorted(folder.glob("*.json")):
        if file.stem in SHOWN:
            continue
        found = json.loads(file.read_text("utf-8"))
        told = found if isinstance(found, dict) else {"rows": found}
        figures = told.get("summary", told)
        words = [
            f"{name.replace('_', ' ')} {figure}"
            for name, figure in figures.items()
            if isinstance(figure, int | float | str) and name != "command"
        ] or [f"{len(figures)} rows"]
        command = f"`{told['command']}`" if "command" in told else f"`{file.name}`"
        rows.append(
            f"| {file.stem.replace('_', ' ')} | {', '.join(words)} | {command} |"
        )
    head = "## Further runs\n\n| What | Figures | Command or file |\n|---|---|---|\n"
    return head + "\n".join(rows) if rows else ""


def _without_source(match: re.Match[str]) -> str:
    """The link as it is if it leads to a page, and its text otherwise."""
    return (
        match[0] if match[2].endswith((".md", ".ipynb", ".png", ".svg")) else match[1]
    )


def _with_whole_options(match: re.Match[str]) -> str:
    if match[0].startswith("<pre"):
        return match[0]
    text = match[0].replace("\\|", "|")  # escaped in a table, as GitHub wants it
    return _OPTION.sub(r'<span class="option">\g<0></span>', text)
