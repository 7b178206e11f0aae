"""Privacy claims of methods that average, for `fedveil describe`."""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.core.method import SUMMED, About

PRIVATE = (
    (
        "proved",
        "with privacy: the messages of a client are (ε, δ)-differentially private for each of its records (add/remove) "
        "at the ε that it has charged, up to the rounding of floats. Steps after the noise, such as codec and "
        "aggregator, cost nothing.",
    ),
    (
        "proved",
        "with user_privacy: the model is (ε, δ)-differentially private for each client. The key relation defines the "
        "neighbours: any other update in the client's place (replacement), or an update of zero (zero-out). The party "
        "adding the noise must be honest: the server, or with secure the clients. Up to colluders clients may reveal "
        'their noise to the server. With where="client" each message is private by itself.',
    ),
)


def raw_about(summary: str, sends: str, paper: str, more: Sequence[tuple[str, str]] = (SUMMED, *PRIVATE)) -> About:
    """Describe a method that sends updates in the clear, with further claims `more`."""
    return About(
        summary,
        sends,
        server_sees="every client's exact update; inversion attacks can reconstruct inputs from it",
        network_sees="the same bytes, unless the transport encrypts them",
        claims=(
            ("measured", "'fedveil audit' rebuilds records of clients with few of them from updates. No protection."),
            *more,
        ),
        paper=paper,
    )
