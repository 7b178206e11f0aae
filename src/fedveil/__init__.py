"""Federated learning in which no raw gradient leaves a client."""

from fedveil.codecs.base import Codec
from fedveil.codecs.fedage import FedAge
from fedveil.codecs.fedsynth import FedSynth
from fedveil.codecs.half import Half
from fedveil.codecs.qsgd import Qsgd
from fedveil.codecs.raw import Raw
from fedveil.codecs.tiers import Tiers
from fedveil.codecs.tofu import Tofu
from fedveil.codecs.topk import TopK
from fedveil.codecs.zstd import Zstd
from fedveil.core.clients import Crowd
from fedveil.core.federation import METHODS, About, Answers, Cohort, Federation, Method, Sampling, State, run, settle
from fedveil.core.ledger import Ledger, Result, Row
from fedveil.core.message import Answer, Question, Record, Refused
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.data import Data, Split, load, split
from fedveil.methods.baffle.baffle import Baffle
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedprox import FedProx
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.presets import FedAgeAvg, FedSynthAvg, TofuAvg
from fedveil.methods.qfedavg import QFedAvg
from fedveil.methods.scaffold import Scaffold
from fedveil.methods.surrogates.feddm import FedDm
from fedveil.methods.surrogates.fedlap import FedLap
from fedveil.privacy import SecureSum
from fedveil.privacy.dpsgd import DpSgd
from fedveil.privacy.users import UserLevel
from fedveil.runs.recipe import Recipe
from fedveil.train.aggregators import Merge
from fedveil.train.local import Local
from fedveil.train.optimizers import Server

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
