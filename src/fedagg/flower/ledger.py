"""An account of what a federation has revealed about its nodes: one line for every noisy sum, written before the sum is used.

Runs on the same nodes add up, provided they share one ledger.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from fedagg import files
from fedagg.errors import FedaggError
from fedagg.flower.privacy import Privacy, epsilon_of


class BudgetSpent(Exception):
    """Nothing more may be revealed about the nodes."""


class Ledger:
    """The noisy sums released so far, in a file, or in memory if there is no folder."""

    def __init__(self, privacy: Privacy, path: Path | None) -> None:
        self.privacy, self.path = privacy, path
        self.lines: list[str] = []
        if path is not None:
            files.folder(path.parent, "ledger")
        if path is not None and path.exists():
            mend(path)
        self.read()

    def read(self) -> list[float]:
        """The noise multipliers of all sums so far."""
        if self.path is not None and self.path.exists():
            try:
                self.lines = self.path.read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError):
                raise FedaggError(f"ledger = {str(self.path)!r}: cannot be read, so the privacy already spent is unknown") from None
        try:
            found = [float(json.loads(line)["noise_multiplier"]) for line in self.lines]
            if not all(0 < noise < math.inf for noise in found):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise FedaggError(f"ledger = {str(self.path)!r}: is damaged, so the privacy already spent is unknown") from None
        return found

    def record(self, run: int, t: int) -> None:
        """Record a noisy sum that is about to be used. It is written to disk first: a server that stops now and repeats the round
        reveals another sum. Raises BudgetSpent if it would reveal too much."""
        if self.exhausted():
            raise BudgetSpent
        line = json.dumps({"run": f"{run:x}", "round": t + 1, "noise_multiplier": self.privacy.noise_multiplier})
        self.lines.append(line)
        if self.path is not None:
            files.append(self.path, line)
            files.flush(self.path)

    def spent(self, more: int = 0) -> dict[str, float]:
        """ε so far, or after `more` further sums. `epsilon` is for a node that takes part or sends nothing, `epsilon_replaced` for
        one whose data are replaced by others: its update may then move by twice the clipping norm."""
        noises = self.read() + more * [self.privacy.noise_multiplier]
        mu = math.sqrt(math.fsum(noise**-2 for noise in noises))
        return {name: epsilon_of(times * mu, self.privacy.delta) for name, times in (("epsilon", 1), ("epsilon_replaced", 2))}

    def exhausted(self) -> bool:
        """Would one more sum exceed the limit?"""
        most = self.privacy.epsilon_max
        return most is not None and self.spent(more=1)["epsilon_replaced"] > most


def mend(path: Path) -> None:
    """Remove a last line that a power cut left incomplete: its sum was not used."""
    held = path.read_bytes()
    if torn := len(held) - held.rfind(b"\n") - 1:
        os.truncate(path, len(held) - torn)
