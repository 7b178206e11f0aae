"""Answer questions: one from stdin to stdout, or with --serve one after the other.

    python -m fedveil_edge records.npz --client 3 < question > answer

With --serve each question on stdin has its length in front of it, as 4 bytes, little-endian. Each reply on stdout is a
length, a byte 0 and the answer, or a length, a byte 1 and the sentence of a refusal. A secure sum needs --serve: its
secrets are in the memory of one process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedveil.core.refused import Refused
from fedveil.methods.baffle.edge.client import Edge

CHUNK = 1 << 16  # bytes of a question that is too long, which are read at once and dropped


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fedveil_edge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, metavar="RECORDS", help="an .npz file with x [n, *input] and y [n, …]")
    parser.add_argument("--client", type=int, required=True, metavar="N", help="the number of this client")
    parser.add_argument("--state", type=Path, metavar="DIR", help="the folder of what the client keeps")
    parser.add_argument("--identity", type=Path, metavar="FILE", help="its private Ed25519 key, for secure sums")
    parser.add_argument("--known", type=Path, metavar="DIR", help="a folder with everybody's identity-K.pub")
    parser.add_argument("--serve", action="store_true", help="answer questions until stdin ends")
    chosen = parser.parse_args(arguments)
    identities = None
    if chosen.identity and chosen.known:
        from fedveil.methods.baffle.edge.summed import identities as read_keys

        identities = read_keys(chosen.known, chosen.client, chosen.identity)
    folder = Path(__file__).resolve().parents[1]
    with np.load(chosen.records, allow_pickle=False) as records:
        edge = Edge(folder, records["x"], records["y"], chosen.client, chosen.state, identities)
    if chosen.serve:
        serve(edge, sys.stdin.buffer, sys.stdout.buffer)
        return
    try:
        sys.stdout.buffer.write(edge.answer(sys.stdin.buffer.read(edge.limit + 1)))
    except Refused as error:
        sys.exit(f"refused: {error}")


def serve(edge: Edge, questions: BinaryIO, replies: BinaryIO) -> None:
    """Answer questions until there are no more. Of one that is too long, no more than the limit is held."""
    while len(head := questions.read(4)) == 4:
        size = int.from_bytes(head, "little")
        question = questions.read(min(size, edge.limit + 1))
        for start in range(len(question), size, CHUNK):
            questions.read(min(CHUNK, size - start))
        try:
            reply = b"\0" + edge.answer(question)
        except Refused as error:
            reply = b"\1" + str(error).encode()
        replies.write(len(reply).to_bytes(4, "little") + reply)
        replies.flush()


if __name__ == "__main__":
    main()
