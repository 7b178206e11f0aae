"""What holds for every method that averages: the privacy claims of `fedveil describe`."""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.core.method import SUMMED, About

PRIVATE = (
    (
        "proved",
        "with privacy: what a client sends is (ε, δ)-differentially private for each of its records (add/remove), at "
        "the ε it has charged, up to the rounding of floats; codec, aggregator and whatever else comes after the noise "
        "cost nothing.",
    ),
    (
        "proved",
        "with user_privacy: the model is (ε, δ)-differentially private for each client. Neighbours differ by the key "
        "relation: another update in the client's place (replacement), or an update of zero (zero-out). The party "
        "adding the noise must be honest: the server, or with secure the clients. Of these, as many as the key "
        "colluders says may tell the server their noise; if all but one of a sum may, each client adds all of it. "
        'With where="client" each message is private by itself.',
    ),
)


def raw_about(summary: str, sends: str, paper: str, more: Sequence[tuple[str, str]] = (SUMMED, *PRIVATE)) -> About:
    """What holds for a method that sends updates in the clear, and `more`."""
    return About(
        summary,
        sends,
        server_sees="every client's update, exactly; from one record's gradient its input can be rebuilt",
        network_sees="the same bytes, unless the transport encrypts them",
        claims=(
            ("measured", "by others: inputs are rebuilt from updates by inversion. It protects nothing."),
            *more,
        ),
        paper=paper,
    )
