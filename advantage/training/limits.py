"""The healthy range of a metric, which every alarm of a run is based on; imports no torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """The healthy range of one metric: `lowest` to `highest`. Every alarm of a run is one of these."""

    metric: str
    meaning: str
    highest: float
    key: str
    """The YAML key with `highest`; empty if no key changes it."""
    advice: str
    lowest: float = 0.0

    def holds(self, value: float) -> bool:
        """Tell whether the value is in the range; NaN is not."""
        return self.lowest <= value <= self.highest

    def sentence(self, value: float, when: str) -> str:
        """Say what is wrong, and what to try."""
        if self.lowest == -math.inf:
            healthy = f"{self.highest:g} or less"
        else:
            healthy = f"{self.lowest:g} " + ("or more" if self.highest == math.inf else f"to {self.highest:g}")
        healthy += f" ({self.key})" if self.key else ""
        return f"{self.meaning} ({self.metric}) is {value:.3g} {when}, and healthy is {healthy}: {self.advice}"
