"""Opens each page of a built site in a browser, and checks how it looks.

    make docs
    python scripts/look_at_site.py build/site --shots build/shots

Each page and each drawing is opened with the sizes of a phone and of a desktop screen,
in light and in dark mode. Problems are printed as JSON, and the exit code is then 1: a
page that scrolls sideways, text that is cut off or overlaps other text, letters that
are too small or too pale, an image, link or anchor without a target, a file of another
site, or an error of a script.

The script needs Playwright and Chromium (`pip install playwright`, and a `chromium` on
the path or `playwright install chromium`). The rest of the project does not need them.
Without them, the script prints this and exits with 0.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import importlib
import json
import pathlib
import shutil
import sys
import threading
import urllib.parse
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

WIDTHS = {360: 740, 1440: 900}
SCHEMES = ("light", "dark")
LEAST_CONTRAST = 4.5  # WCAG 2.1, level AA
LEAST_LETTERS_PX = 9
HIGHEST = 6000  # px of a page in its picture

# All measurements in a page. `texts` are the lines of letters as they are drawn.
MEASURE = """
([leastContrast, leastLetters]) => {
  const wrong = [];
  const say = (what, words) => wrong.push([what, words.trim().slice(0, 90)]);
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth + 1)
    say("scrolls sideways", `${root.scrollWidth} px of ${innerWidth}`);

  const canvas = document.createElement("canvas").getContext(
    "2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (colour) => {  // of any notation of CSS
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return known.get(colour);
  };
  const over = (top, below) => [0, 1, 2].map(
    (i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const v = c[i] / 255;
    return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const contrast = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const ancestors = (element) => {
    const all = [];
    for (let e = element; e; e = e.parentElement) all.push(e);
    return all;
  };
  const style = (element) => getComputedStyle(element);
  const background = (element) => {
    const layers = ancestors(element).map((e) => rgba(style(e).backgroundColor));
    const white = [255, 255, 255, 1];
    return layers.reverse().reduce((below, top) => over(top, below), white);
  };

  const texts = [];
  const walker = document.createTreeWalker(document.body ?? root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const words = node.data.trim();
    const element = node.parentElement;
    if (!words || element.closest("script, style, title, noscript, [hidden]")) continue;
    const above = ancestors(element);
    if (above.some((e) => e.tagName === "DETAILS" && !e.open) &&
        !element.closest("summary")) continue;
    const own = style(element);
    const opacity = above.reduce((all, e) => all * style(e).opacity, 1);
    if (own.visibility !== "visible" || opacity < 0.05) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const rects = [...range.getClientRects()].filter(
      (r) => r.width > 1 && r.height > 1);
    if (!rects.length) continue;
    // A layer that is moved out of sight until it is asked for, such as a menu.
    const fixed = above.some((e) => ["fixed", "sticky"].includes(style(e).position));
    const away = rects.every((r) => r.right <= 0 || r.left >= innerWidth);
    if (fixed && away) continue;

    const scale = element.getScreenCTM ? element.getScreenCTM().a : 1;
    const size = parseFloat(own.fontSize) * scale;
    if (size < leastLetters) say("small letters", `${size.toFixed(1)} px: ${words}`);

    const ink = rgba(element.getScreenCTM ? own.fill : own.color);
    const behind = background(element);
    const seen = over([...ink.slice(0, 3), ink[3] * opacity], behind);
    const ratio = contrast(seen, behind);
    if (ratio < leastContrast) say("pale", `${ratio.toFixed(2)}: ${words}`);

    // The nearest box that clips it, unless the reader can scroll it.
    const scroller = above.find((e) => e !== root && e !== document.body &&
      ["auto", "scroll"].some((o) => style(e).overflowX === o));
    const clip = above.find((e) => e !== root && e !== document.body &&
      ["hidden", "clip"].some((o) => style(e).overflowX === o) &&
      style(e).display !== "inline");
    const inside = !scroller || (clip && scroller.contains(clip));
    for (const r of rects) {
      if (clip && inside) {
        const box = clip.getBoundingClientRect();
        if (r.left < box.left - 1 || r.right > box.right + 1) say("cut", words);
      }
      if (!scroller && !away && (r.left < -1 || r.right > innerWidth + 1))
        say("outside", words);
      let shown = { left: r.left, right: r.right, top: r.top, bottom: r.bottom };
      if (scroller) {
        const box = scroller.getBoundingClientRect();
        shown.left = Math.max(r.left, box.left);
        shown.right = Math.min(r.right, box.right);
        if (style(scroller).overflowY !== "visible") {
          shown.top = Math.max(r.top, box.top);
          shown.bottom = Math.min(r.bottom, box.bottom);
        }
      }
      if (!fixed) texts.push({ ...shown, node, words });
    }
  }

  texts.sort((a, b) => a.top - b.top);
  texts.forEach((a, i) => {
    for (let j = i + 1; j < texts.length && texts[j].top < a.bottom - 4; j++) {
      const b = texts[j];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - b.top;
      const nested = a.node.parentElement.contains(b.node) ||
        b.node.parentElement.contains(a.node);
      if (a.node !== b.node && across > 2 && down > (nested ? 8 : 4))
        say("overlap", `${a.words.slice(0, 40)} | ${b.words.slice(0, 40)}`);
    }
  });

  for (const image of document.images) {
    if (image.complete && !image.naturalWidth) say("no image", image.src);
    if (!image.alt && !image.closest("a")) say("no alternative text", image.src);
  }
  const links = [...document.querySelectorAll("a[href]")].map((a) => a.href);
  const plots = [...document.images].filter((i) => /\\.svg$/.test(i.src));
  const drawings = plots.map((i) => ({
    src: i.src, width: i.getBoundingClientRect().width,
    background: `rgb(${background(i).slice(0, 3).join()})` }));
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  const names = [...document.querySelectorAll("a[name]")].map((e) => e.name);
  return { wrong, links, drawings, ids: ids.concat(names) };
}
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site without printing a line for each request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def served(site: pathlib.Path) -> Generator[str]:
    """Serves the site to this machine, and yields its address."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()


def look(
    browser: Any, site: pathlib.Path, home: str, shots: pathlib.Path | None, only: str
) -> list[dict[str, str]]:
    """All problems, with the views in which they occur."""
    found: dict[tuple[str, str, str], list[str]] = {}
    ids: dict[str, set[str]] = {}
    links: dict[str, set[str]] = {}
    pages = sorted(x.relative_to(site).as_posix() for x in site.rglob("*.html"))
    for width, height in WIDTHS.items():
        for scheme in SCHEMES:
            view = f"{width} {scheme}"
            tab = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            blank = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            heard: list[tuple[str, str]] = []
            _listen(tab, home, heard)
            for page in (x for x in pages if only in x):
                heard.clear()
                tab.goto(home + page, wait_until="load")
                tab.wait_for_timeout(50)  # the theme's script first places its layers
                seen = tab.evaluate(MEASURE, [LEAST_CONTRAST, LEAST_LETTERS_PX])
                ids[page] = set(seen["ids"])
                links.setdefault(page, set()).update(seen["links"])
                wrong = [*heard, *seen["wrong"]]
                for drawing in seen["drawings"]:
                    wrong += _drawing(blank, site, home, drawing)
                for what, words in dict.fromkeys(map(tuple, wrong)):
                    found.setdefault((page, what, words), []).append(view)
                if shots is not None:
                    name = page.removesuffix(".html").replace("/", "_")
                    path = shots / f"{name}_{width}_{scheme}.png"
                    high = tab.evaluate("document.documentElement.scrollHeight")
                    clip = {
                        "x": 0,
                        "y": 0,
                        "width": width,
                        "height": min(high, HIGHEST),
                    }
                    tab.screenshot(path=path, full_page=True, clip=clip)
            tab.close()
            blank.close()
    for page, targets in links.items():
        for target in sorted(targets):
            if why := _leads_nowhere(site, home, target, ids):
                found[page, why, target.removeprefix(home)] = ["all"]
    return [
        {"page": page, "what": what, "words": words, "views": ", ".join(views)}
        for (page, what, words), views in found.items()
    ]


def _listen(tab: Any, home: str, heard: list[tuple[str, str]]) -> None:
    """Adds errors of the tab to *heard*; prevents loading from other sites."""

    def fetch(route: Any) -> None:
        address = route.request.url
        if address.startswith((home, "data:", "blob:")):
            route.continue_()
        else:
            heard.append(("file of another site", address))
            route.abort()

    tab.route("**/*", fetch)
    tab.on("pageerror", lambda error: heard.append(("error", str(error))))
    tab.on(
        "console",
        lambda line: line.type == "error" and heard.append(("console", line.text)),
    )


def _drawing(
    tab: Any, site: pathlib.Path, home: str, drawing: dict[str, Any]
) -> list[tuple[str, str]]:
    """Problems of the letters in a drawing, at the size at which the page shows it."""
    path = urllib.parse.urlsplit(drawing["src"]).path.lstrip("/")
    if not drawing["src"].startswith(home) or not (site / path).is_file():
        return []
    letters = (site / path).read_text("utf-8")
    tab.set_content(
        f'<body style="margin:0;background:{drawing["background"]}">'
        f'<div style="width:{drawing["width"]}px">{letters}</div>'
    )
    seen = tab.evaluate(MEASURE, [LEAST_CONTRAST, LEAST_LETTERS_PX])
    return [(what, f"{path}: {words}") for what, words in seen["wrong"]]


def _leads_nowhere(
    site: pathlib.Path, home: str, target: str, ids: dict[str, set[str]]
) -> str | None:
    """Why a link of the site has no target; None if it has one, or leads to another
    site.
    """
    if not target.startswith(home):
        return None
    parts = urllib.parse.urlsplit(target)
    page = urllib.parse.unquote(parts.path).lstrip("/") or "index.html"
    if page.endswith("/"):
        page += "index.html"
    if not (site / page).is_file():
        return "no such page"
    anchor = urllib.parse.unquote(parts.fragment)
    if anchor and page in ids and anchor not in ids[page]:
        return "no such anchor"
    return None


def main() -> int:
    """Checks the given site; returns the exit code."""
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("site", type=pathlib.Path, help="the folder of the built site")
    words.add_argument(
        "--shots", type=pathlib.Path, help="folder for pictures of all pages"
    )
    words.add_argument("--only", default="", help="pages with this in their path")
    options = words.parse_args()
    if not any(options.site.rglob("*.html")):
        words.error(f"no page lies in {options.site}; `make docs` builds the site")
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ModuleNotFoundError:
        print("skipped: this needs playwright (pip install playwright) and Chromium")
        return 0
    if options.shots is not None:
        options.shots.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as engine, served(options.site) as home:
        browser = engine.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        found = look(browser, options.site, home, options.shots, options.only)
        browser.close()
    print(json.dumps(found, indent=1, ensure_ascii=False))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
