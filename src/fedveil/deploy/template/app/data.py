"""Where records come from: the one file to change."""

from pathlib import Path

from fedveil import Data
from fedveil.runs import recipe


def load(partition: int | None, partitions: int) -> Data:
    """The records of client `partition`, from 0, of `partitions`; for the server (None), the records it tests on.

    Called where the records are: on a client's machine with its number, on the server's with None. `classes`, and how
    inputs are scaled, must be the same everywhere, whatever a client happens to hold.
    """
    # In earnest, read what lies on this machine, for instance
    #
    #     with numpy.load(os.environ["RECORDS"]) as own:
    #         return fedveil.data.from_tensors(own["x"], own["y"], own["x"][:1], own["y"][:1], classes=10)
    #
    # A client's test records and the server's training records are not used, but there must be one.
    #
    # As it is, task.data in the recipe decides. A function of your own that takes `partition` returns the records of
    # this party. Otherwise, for the rehearsal, every client takes its part of a data set that all of them can read.
    plan = recipe.read(str(Path(__file__).with_name("recipe.toml")))
    return plan.part(partition)
