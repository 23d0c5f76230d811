"""Links between our pages lead somewhere: to a file that is there, and to a heading that it has."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`(?:[^`\n]|\n(?!\n))*`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
ELSEWHERE = ("http://", "https://", "mailto:")


def anchors(page):
    """Of its headings, as GitHub makes them."""
    found = []
    for heading in re.findall(r"^#{1,6} +(.+?) *$", FENCED.sub("", page.read_text()), re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)  # of a link its text
        slug = re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-")
        found.append((slug, sum(slug == earlier for earlier, _ in found)))
    return {f"{slug}-{again}" if again else slug for slug, again in found}


def links(page):
    """What it links to in this repository: (path or "", anchor or "")."""
    text = CODE.sub("", FENCED.sub("", page.read_text()))
    return [
        tuple(target.partition("#")[::2])
        for target in LINK.findall(text)
        if not target.startswith(ELSEWHERE)
    ]


def dead_links(page):
    for path, anchor in links(page):
        there = page.parent / path if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            yield f"{path}#{anchor}" if anchor else path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    assert list(dead_links(page)) == []


def test_the_pages_do_link_to_each_other_and_to_headings():
    found = [link for page in PAGES for link in links(page)]
    assert sum(bool(path) for path, _ in found) > 20
    assert sum(bool(anchor) for _, anchor in found) > 10


def test_a_dead_link_is_seen(tmp_path):
    (tmp_path / "one.md").write_text(
        "# One\n## What it costs (2026-11-30)\n## `make bench`: it, and_others\n## One\n"
        "```console\n# no heading\n$ [a](b.md)\n```\n`[c](d.md)`\n"
        "[1](#one) [2](#one-1) [3](one.md#what-it-costs-2026-11-30) [4](https://example.org/x)\n"
        "[5](#make-bench-it-and_others) [6](two.md) [7](#no-heading) [8](one.md#what-it-costs)\n"
        "![9](nine.svg)\n"
    )
    told = ["two.md", "#no-heading", "one.md#what-it-costs", "nine.svg"]
    assert list(dead_links(tmp_path / "one.md")) == told
