"""Hooks of mkdocs that add the README and similar files to the site.

These files are not in the folder of pages, so their links are changed to be relative to
this folder. A link to a file that is not a page, such as an example, becomes plain
text. ``<!-- data -->`` is replaced by a table of the data files that have no plot.
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

# Blocks of code, in which no line may break, and code within text.
_CODE = re.compile(r"<pre.*?</pre>|<code>[^<]*</code>", re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that are outside of the pages' folder."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=moved(text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Removes links that do not lead to a page."""
    return _LINK.sub(_without_source, markdown.replace(DATA, further_data()))


def on_page_content(html: str, **_: Any) -> str:
    """Prevents line breaks within options such as ``--out``, and unescapes pipes."""
    return _CODE.sub(_with_whole_options, html)


def moved(text: str) -> str:
    """The text of a file outside of the pages' folder, with links relative to this
    folder.
    """
    for page, source in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text.replace("](docs/", "](")


def further_data(folder: pathlib.Path = ROOT / "docs" / "data") -> str:
    """A table of further measurements; '' if there are none.

    A data file has its ``command``. Its figures are under ``summary``, or at the top
    level.
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
    """The link itself if it leads to a page; otherwise its text."""
    return (
        match[0] if match[2].endswith((".md", ".ipynb", ".png", ".svg")) else match[1]
    )


def _with_whole_options(match: re.Match[str]) -> str:
    if match[0].startswith("<pre"):
        return match[0]
    # Tables on GitHub need a backslash before a pipe.
    text = match[0].replace("\\|", "|")
    return _OPTION.sub(r'<span class="option">\g<0></span>', text)
