"""Cut STIX Two Math (npm has it as @fontsource/stix-two-math) down to what formulas use: `python tools/math_font.py FILE.woff`.

The site brings this font, so that formulas look the same everywhere; browsers stretch bars, roots and brackets by its MATH table.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fontTools import subset

FONT = Path(__file__).resolve().parent.parent / "docs" / "assets" / "stix-two-math.woff"
RANGES = (
    (0x20, 0x7F),
    (0xA0, 0x100),
    (0x2C6, 0x2DE),  # accents
    (0x300, 0x340),
    (0x370, 0x400),  # Greek
    (0x2010, 0x20A0),  # dashes, primes, small figures
    (0x20D0, 0x20F0),
    (0x2100, 0x2150),  # letters such as ℝ
    (0x2190, 0x2300),  # arrows and operators
    (0x2308, 0x230C),
    (0x23DC, 0x23E2),
    (0x27E6, 0x27F0),  # brackets
    (0x27F5, 0x2800),
    (0x2A00, 0x2A10),
    (0x2A7D, 0x2A7F),
    (0x1D400, 0x1D504),  # bold, italic and script letters
    (0x1D538, 0x1D56C),
    (0x1D670, 0x1D756),
)


def main(source: str) -> None:
    options = subset.Options(flavor="woff", layout_features=["*"], notdef_outline=True)
    font = subset.load_font(source, options)
    cut = subset.Subsetter(options)
    cut.populate(unicodes=[code for first, end in RANGES for code in range(first, end)])
    cut.subset(font)
    subset.save_font(font, str(FONT), options)
    print(f"{FONT}: {FONT.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
