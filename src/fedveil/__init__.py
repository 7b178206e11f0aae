"""Federated learning in which no raw gradient leaves a client."""

from fedveil.clients import Crowd
from fedveil.data import Data, Split, load, split
from fedveil.federation import METHODS, About, Answers, Cohort, Federation, Method, Sampling, State, run, settle
from fedveil.ledger import Ledger, Result, Row
from fedveil.local import Local
from fedveil.message import Answer, Question, Record, Refused
from fedveil.privacy import SecureSum
from fedveil.privacy.dpsgd import DpSgd
from fedveil.privacy.users import UserLevel
from fedveil.probes.baffle import Baffle
from fedveil.recipe import Recipe
from fedveil.seeds import Seed
from fedveil.server import Merge, Server
from fedveil.surrogates.feddm import FedDm
from fedveil.surrogates.fedlap import FedLap
from fedveil.task import Task
from fedveil.updates.codec import Codec, Raw
from fedveil.updates.compress import Half, Qsgd, TopK
from fedveil.updates.fair import QFedAvg
from fedveil.updates.fedage import FedAge
from fedveil.updates.fedsynth import FedSynth
from fedveil.updates.raw import FedAvg, FedProx, FedSGD
from fedveil.updates.scaffold import Scaffold
from fedveil.updates.squeeze import Zstd
from fedveil.updates.synthetic import FedAgeAvg, FedSynthAvg, TofuAvg
from fedveil.updates.tiers import Tiers
from fedveil.updates.tofu import Tofu

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "About",
    "Answer",
    "Answers",
    "Baffle",
    "Codec",
    "Cohort",
    "Crowd",
    "Data",
    "DpSgd",
    "FedAge",
    "FedAgeAvg",
    "FedAvg",
    "FedDm",
    "FedLap",
    "FedProx",
    "FedSGD",
    "FedSynth",
    "FedSynthAvg",
    "Federation",
    "Half",
    "Ledger",
    "Local",
    "Merge",
    "Method",
    "QFedAvg",
    "Qsgd",
    "Question",
    "Raw",
    "Recipe",
    "Record",
    "Refused",
    "Result",
    "Row",
    "Sampling",
    "Scaffold",
    "SecureSum",
    "Seed",
    "Server",
    "Split",
    "State",
    "Task",
    "Tiers",
    "Tofu",
    "TofuAvg",
    "TopK",
    "UserLevel",
    "Zstd",
    "load",
    "run",
    "settle",
    "split",
]
