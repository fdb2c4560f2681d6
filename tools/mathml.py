"""MkDocs hook: formulas become MathML when the site is built.

Browsers draw MathML themselves, so the site needs no script and no network for its mathematics. A formula that cannot
be converted, or only in part, fails the build.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\s*\\[(\[](?P<latex>.*?)\\[)\]]\s*</(?P=tag)>', re.DOTALL)
LETTER = re.compile(r'<mi mathvariant="(?P<style>monospace|script|double-struck)">(?P<letter>[A-Za-z])</mi>')
# Browsers follow MathML Core, which knows these alphabets as characters only: where A and a of each stand in Unicode.
ALPHABETS = {"monospace": (0x1D670, 0x1D68A), "script": (0x1D4D0, 0x1D4EA), "double-struck": (0x1D538, 0x1D552)}
DOUBLE_STRUCK = {"C": "ℂ", "N": "ℕ", "P": "ℙ", "Q": "ℚ", "R": "ℝ", "Z": "ℤ"}

BAR = r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>'


def letter(found: re.Match[str]) -> str:
    style, character = found["style"], found["letter"]
    upper, lower = ALPHABETS[style]
    code = upper + ord(character) - ord("A") if character.isupper() else lower + ord(character) - ord("a")
    drawn = DOUBLE_STRUCK.get(character, chr(code)) if style == "double-struck" else chr(code)
    return f"<mi>{drawn}</mi>"


def mathml(latex: str, block: bool) -> str:
    converted = LETTER.sub(letter, convert(latex, display="block" if block else "inline"))
    # Bars of norms are neither stretched nor spaced like relations.
    converted = re.sub(r'<mo(?: stretchy="false")?>(&#x02016;|&#x0007C;)</mo>', BAR, converted)
    if "\\" in converted:
        raise ValueError(f"cannot be written as MathML: {latex}")
    return converted


def formula(found: re.Match[str]) -> str:
    tag = found["tag"]
    return f'<{tag} class="arithmatex">{mathml(html.unescape(found["latex"]).strip(), tag == "div")}</{tag}>'


def plain_titles(entries: Any) -> None:
    """The table of contents shows headings as text: a formula in one is shown without its delimiters."""
    for entry in entries:
        entry.title = re.sub(r"\\[()]", "", entry.title)
        plain_titles(entry.children)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    plain_titles(page.toc)
    converted = FORMULA.sub(formula, content)
    if re.search(r'class="arithmatex">\s*\\', converted):
        raise ValueError("a formula was not understood")
    return converted
