"""What a server counts and times, as the text that Prometheus reads from /metrics.

Counters, gauges and histograms of a dozen lines each: the format is a line a number, and the
official client would bring a registry with locks that one event loop has no need of.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

PREFIX = "foundling_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of what is timed."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Histogram:
    """How often a duration fell below each bound."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """As Prometheus reads it: each bucket holds those of the buckets below."""
        inner = labels[1:-1] + "," if labels else ""
        bounds = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        totals = list(accumulate(self.counts))
        for bound, total in zip(bounds, totals, strict=True):
            yield f'{name}_bucket{{{inner}le="{bound}"}} {total}'
        yield f"{name}_sum{labels} {self.sum:.6f}"
        yield f"{name}_count{labels} {totals[-1]}"


@dataclass
class ModelMetrics:
    """What happened to the requests of one model."""

    requests: int = 0
    """Sequences that were taken on."""
    cancelled: int = 0
    """Sequences that nobody waited for to the end."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of prompts that were found in the cache."""
    generated_tokens: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)

    def counters(self) -> dict[str, tuple[str, int]]:
        """What only grows: help and value by name."""
        return {
            "requests_total": ("sequences that were taken on", self.requests),
            "cancelled_total": ("sequences that nobody waited for", self.cancelled),
            "prompt_tokens_total": ("tokens of prompts", self.prompt_tokens),
            "prefix_hit_tokens_total": ("tokens of prompts found in the cache", self.cached_tokens),
            "generated_tokens_total": ("tokens written", self.generated_tokens),
        }

    def histograms(self) -> dict[str, tuple[str, Histogram]]:
        """What is timed."""
        return {
            "first_token_seconds": ("from a request to its first token", self.first_token),
            "between_tokens_seconds": ("between tokens of a stream", self.between_tokens),
        }


Gauges = Mapping[str, tuple[str, float]]
"""Help and value of what goes up and down, by name; what the engine counts ends in _total."""


def exposition(
    models: Mapping[str, tuple[ModelMetrics, Gauges]], statuses: Mapping[int, int]
) -> str:
    """The whole text of /metrics: all models' numbers, and responses by status code."""
    said: dict[str, list[str]] = {}

    def put(name: str, kind: str, help: str, lines: Iterator[str]) -> None:
        whole = PREFIX + name
        head = [f"# HELP {whole} {help}", f"# TYPE {whole} {kind}"]
        said.setdefault(whole, head).extend(lines)

    for id, (metrics, gauges) in models.items():
        labels = f'{{model="{_escaped(id)}"}}'
        for name, (help, count) in metrics.counters().items():
            put(name, "counter", help, iter([f"{PREFIX}{name}{labels} {count}"]))
        for name, (help, value) in gauges.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            put(name, kind, help, iter([f"{PREFIX}{name}{labels} {value:g}"]))
        for name, (help, timed) in metrics.histograms().items():
            put(name, "histogram", help, timed.lines(PREFIX + name, labels))
    for status, count in sorted(statuses.items()):
        line = f'{PREFIX}responses_total{{status="{status}"}} {count}'
        put("responses_total", "counter", "responses by status", iter([line]))
    return "\n".join(line for lines in said.values() for line in lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
