"""Data sets, a user's own data, and how records are split over clients."""

from fedveil.data.files import DataMissing
from fedveil.data.sets import SETS, Data, from_dataset, from_folder, from_tensors, load
from fedveil.data.splits import SPLITS, Share, Split, split

__all__ = [
    "SETS",
    "SPLITS",
    "Data",
    "DataMissing",
    "Share",
    "Split",
    "from_dataset",
    "from_folder",
    "from_tensors",
    "load",
    "split",
]
