"""The names of `import fedveil as fv`, which `fedveil` itself imports when the first of them is used."""

from fedveil.codecs.agreed import AgreedCodec, Tuned
from fedveil.codecs.base import Codec
from fedveil.codecs.fedage import FedAgeCodec
from fedveil.codecs.fedsynth import FedSynthCodec
from fedveil.codecs.half import Half
from fedveil.codecs.powersgd import PowerSgd
from fedveil.codecs.qsgd import Qsgd
from fedveil.codecs.raw import Raw
from fedveil.codecs.sketch import Sketch
from fedveil.codecs.tiers import Tiers
from fedveil.codecs.tofu import TofuCodec
from fedveil.codecs.topk import TopK
from fedveil.codecs.zstd import Zstd
from fedveil.core.batchnorm import group_norm
from fedveil.core.cohort import Answers, Cohort
from fedveil.core.ledger import Ledger, Result, Row
from fedveil.core.loop import Federation
from fedveil.core.message import Answer, Question, Record, Refused, Slots
from fedveil.core.method import METHODS, About, Method, State
from fedveil.core.metrics import Metric
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.setup import settle
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.core.version import __version__
from fedveil.data import Data, Split, load, split
from fedveil.facade import plot, run
from fedveil.links.up import Total
from fedveil.many import Runs, run_many
from fedveil.methods.averaging import Averaging
from fedveil.methods.baffle.baffle import Baffle
from fedveil.methods.baffle.epochs import BaffleEpochs
from fedveil.methods.baffle.local import LocalSteps
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.feddyn import FedDyn
from fedveil.methods.fedprox import FedProx
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.presets import FedAge, FedSynth, Tofu
from fedveil.methods.qfedavg import QFedAvg
from fedveil.methods.scaffold import Scaffold
from fedveil.methods.surrogates.feddm import FedDm
from fedveil.methods.surrogates.fedlap import FedLap
from fedveil.privacy import SecureSum
from fedveil.privacy.dpsgd import DpSgd
from fedveil.privacy.users import UserLevel
from fedveil.runs.plugins import load_plugins
from fedveil.runs.recipe import Recipe, SplitSpec, TaskSpec
from fedveil.train.aggregators import Aggregator
from fedveil.train.local import LocalTraining
from fedveil.train.optimizers import ServerOptimizer
from fedveil.train.trainers import Trained
from fedveil.train.vectors import Vectors

__all__ = [
    "METHODS",
    "About",
    "Aggregator",
    "AgreedCodec",
    "Answer",
    "Answers",
    "Averaging",
    "Baffle",
    "BaffleEpochs",
    "ClientStack",
    "Codec",
    "Cohort",
    "CohortSampler",
    "Data",
    "DpSgd",
    "FedAge",
    "FedAgeCodec",
    "FedAvg",
    "FedDm",
    "FedDyn",
    "FedLap",
    "FedProx",
    "FedSGD",
    "FedSynth",
    "FedSynthCodec",
    "Federation",
    "Half",
    "Ledger",
    "LocalSteps",
    "LocalTraining",
    "Method",
    "Metric",
    "PowerSgd",
    "QFedAvg",
    "Qsgd",
    "Question",
    "Raw",
    "Recipe",
    "Record",
    "Refused",
    "Result",
    "Row",
    "Runs",
    "Scaffold",
    "SecureSum",
    "Seed",
    "ServerOptimizer",
    "Sketch",
    "Slots",
    "Split",
    "SplitSpec",
    "State",
    "Task",
    "TaskSpec",
    "Tiers",
    "Tofu",
    "TofuCodec",
    "TopK",
    "Total",
    "Trained",
    "Tuned",
    "UserLevel",
    "Vectors",
    "Zstd",
    "__version__",
    "group_norm",
    "load",
    "load_plugins",
    "plot",
    "run",
    "run_many",
    "settle",
    "split",
]
