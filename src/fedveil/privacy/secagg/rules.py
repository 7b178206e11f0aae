"""Who masks with whom and how many must stay. Clients without PyTorch share this module."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.privacy.secagg import graph


@dataclass(frozen=True)
class Rules:
    """The settings of a secure sum that both sides go by.

    clip:       values beyond ±clip are cut, and counted in the ledger
    bits:       of a value in fixed point, its sign among them; elements have 32 bits, or 64 if the sum of all clients
                needs them
    server:     whom it protects from: a "curious" server that keeps to the protocol, or a "malicious" one
    min_clients: the fewest clients that a client lets itself be summed with
    neighbours: with how many others a client masks; None chooses, and is everybody in cohorts of up to 100
    """

    clip: float = 1.0
    bits: int = 20
    server: str = "curious"
    min_clients: int = 3
    neighbours: int | None = None

    def __post_init__(self) -> None:
        if self.clip <= 0 or not 2 <= self.bits <= 52:
            raise ValueError("a secure sum needs clip above 0 and from 2 to 52 bits")
        if self.server not in ("curious", "malicious"):
            raise ValueError(f"secure.server is '{self.server}'; use curious or malicious")
        if self.min_clients < 3:
            raise ValueError("secure.min_clients is at least 3: of a sum of two each knows the other's part")
        if self.neighbours is not None and (self.neighbours < 2 or self.neighbours % 2):
            raise ValueError("secure.neighbours is an even number from 2 on; leave it out to let the cohort decide")
        if self.server == "malicious" and self.neighbours is not None:
            raise ValueError("against a malicious server everybody masks with everybody; leave secure.neighbours out")

    def quorum(self, n: int) -> int:
        """The fewest of n clients that are summed, and that together can recover a secret."""
        return max(self.min_clients, 2 * n // 3 + 1 if self.server == "malicious" else graph.majority(n))

    def degree(self, n: int) -> int:
        """The number of a client's neighbours among n."""
        return n - 1 if self.server == "malicious" else min(self.neighbours or graph.degree(n), n - 1)

    def threshold(self, n: int, quorum: int) -> int:
        """The number of shares that recover a secret: the quorum, or a majority of a neighbourhood."""
        k = self.degree(n)
        return quorum if k >= n - 1 else graph.majority(k + 1)
