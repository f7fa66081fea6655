"""How long a conversation may last, pause and wait, and how far behind anybody may be. No Ray."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    backlog_s: float = 30.0  # unprocessed audio; a real-time client never gets near
    unread_reports: int = 256  # results that nobody fetched
    pause_after_s: float = 5.0
    idle_timeout_s: float = 300.0  # a conversation in which nothing was ever heard is closed
    pause_timeout_s: float = 1800.0  # the longest pause
    length_limit_s: float | None = None  # the longest conversation; None: any length
    reader_grace_s: float = 60.0  # a conversation that nobody reads from is closed
    restore_s: float = 120.0  # how long a conversation whose engine is lost waits for another
    park_s: float = 1800.0  # the same while an engine is replaced as planned: large weights take their time to load
    poll_s: float = 10.0
    observe_s: float = 5.0  # how often gauges are set; Ray forgets one that is not for half a minute

    def over(self, unread_s: float, silent_s: float, heard: bool, units: int) -> str | None:
        """Why a conversation is to end that nobody has read from and that has heard nothing for so long; None: not
        yet."""
        if unread_s > self.reader_grace_s:
            return "reader_lost"
        if heard and silent_s > self.pause_timeout_s:
            return "pause_timeout"
        if not heard and silent_s > self.idle_timeout_s:
            return "idle_timeout"
        if self.length_limit_s is not None and units >= self.length_limit_s:
            return "length_limit"
        return None

    @property
    def look_s(self) -> float:
        """How often to look."""
        times = [self.reader_grace_s, self.idle_timeout_s, self.pause_timeout_s, self.length_limit_s or 60.0]
        return min(1.0, *(t / 4 for t in times))
