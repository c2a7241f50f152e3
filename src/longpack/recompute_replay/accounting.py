"""Count the bytes that records hold, now and at most, by channel and by site."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes held by the records of a channel, random states included; `sites` splits them."""

    live_bytes: int = 0
    peak_bytes: int = 0
    sites: Mapping[str, "Usage"] = field(default_factory=dict)


class Ledger:
    """The running count of one channel. Records are freed on any thread, so it locks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._total_live = self._total_peak = 0

    def add(self, site: str, nbytes: int) -> None:
        with self._lock:
            live = self._live.get(site, 0) + nbytes
            self._live[site] = live
            if live > self._peak.get(site, 0):
                self._peak[site] = live
            self._total_live += nbytes
            self._total_peak = max(self._total_peak, self._total_live)

    def remove(self, held: Iterable[tuple[str, int]]) -> None:
        with self._lock:
            for site, nbytes in held:
                self._live[site] -= nbytes
                self._total_live -= nbytes

    def usage(self) -> Usage:
        with self._lock:
            sites = {site: Usage(self._live[site], self._peak[site]) for site in self._peak}
            return Usage(self._total_live, self._total_peak, sites)
