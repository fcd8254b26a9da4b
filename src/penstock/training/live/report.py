"""What a live stream tells of itself."""

from __future__ import annotations

from penstock.base.units import format_seconds
from penstock.base.values import Value


class StreamReport(Value, frozen=True, kw_only=True):
    """What has become of the frames of a stream so far; printed, it is a table.

    Attributes:
        num_given: frames that somebody has given to the stream.
        num_dropped: of these, how many were dropped in front of the first stage.
        num_late: how many came while another one still waited for the first stage, which was not
            free in time; with a rate above the pipeline's, nearly all.
        num_results: how many results somebody has taken.
        num_labelled: of these, how many had a target.
        num_waiting: frames that wait for the first stage now.
        longest_queue: the most that have waited at once.
        frames_per_second: results per second, from the first to the last; ``None`` before two.
        latency_p50_seconds: what half of the latest 10,000 results stayed below, from when the
            frame was given until its output was there. Rate and latency say different things: more
            stages raise the one and not the other.
        latency_p95_seconds, latency_p99_seconds: likewise 95 and 99 of 100.
        mean_loss: the mean over all labelled frames of the loss before anything was learned from
            the frame (prequential loss).
        gradient_age: how many frames old gradients are when the first stage learns from them.
        mean_change: how much frames change meanwhile, ‖x(t) − x(t−age)‖/‖x(t)‖, looked at every
            now and then; ``None`` if gradients are not old or frames have no numbers to compare.
    """

    num_given: int
    num_dropped: int
    num_late: int
    num_results: int
    num_labelled: int
    num_waiting: int
    longest_queue: int
    frames_per_second: float | None
    latency_p50_seconds: float | None
    latency_p95_seconds: float | None
    latency_p99_seconds: float | None
    mean_loss: float | None
    gradient_age: int
    mean_change: float | None

    def rows(self) -> list[tuple[str, str]]:
        """What there is to say, as pairs (what, how much)."""
        quantiles = (
            self.latency_p50_seconds,
            self.latency_p95_seconds,
            self.latency_p99_seconds,
        )
        rate = self.frames_per_second
        latency = " · ".join("–" if q is None else format_seconds(q) for q in quantiles)
        dropped = f"{self.num_dropped:,} dropped, {self.num_late:,} late"
        rows = [
            ("frames", f"{self.num_given:,} given, {dropped}"),
            ("results", f"{self.num_results:,}, of which {self.num_labelled:,} with a target"),
            ("rate", "–" if rate is None else f"{rate:.1f} frames/s"),
            ("latency p50 · p95 · p99", latency),
            ("waiting", f"{self.num_waiting:,} now, {self.longest_queue:,} at most"),
            ("prequential loss", "–" if self.mean_loss is None else f"{self.mean_loss:.4g}"),
        ]
        if self.gradient_age:
            change = "not compared" if self.mean_change is None else f"{self.mean_change:.0%}"
            age = f"{self.gradient_age} frames at stage 0"
            rows += [("age of gradients", age), ("frames change meanwhile by", change)]
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
