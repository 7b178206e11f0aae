"""Refusals: bytes, values and questions that must not be used. This module needs nothing but Python."""

from __future__ import annotations

DETAIL_LIMIT = 300  # a refusal quotes what was found, and a ledger must not swell with it
# Reasons of refusals that depend on what was asked and when, and on no record. Others are not told where records are
# private: a refusal for what an answer would have held is an answer too.
ABOUT_QUESTIONS = {
    *("over budget", "lost state", "out of step", "too large", "malformed", "truncated", "trailing bytes", "damaged"),
    *("wrong kind", "wrong field", "wrong round", "wrong run", "wrong stage", "wrong version", "unknown client"),
    *("bad key", "bad set", "bad share", "bad signature"),
}


class Refused(Exception):
    """Bytes or values that must not be used. `reason` is one of a fixed set of short names, `detail` a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail[:DETAIL_LIMIT]
        super().__init__(f"{reason}: {self.detail}")
