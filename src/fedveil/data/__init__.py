"""Data sets, a user's own data, and how records are split over clients."""

from fedveil.core.data import Data, Split
from fedveil.data.files import DataMissing
from fedveil.data.folders import from_folder
from fedveil.data.sets import SETS, load
from fedveil.data.splits import SPLITS, Share, split
from fedveil.data.tensors import from_dataset, from_tensors, hold_out

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
    "hold_out",
    "load",
    "split",
]
