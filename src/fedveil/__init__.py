"""Federated learning in which no raw gradient leaves a client."""

from fedveil.data import Data, Split, load, split
from fedveil.federation import METHODS, About, Answers, Cohort, Crowd, Federation, Method, Sampling, State, run
from fedveil.ledger import Ledger, Result, Row
from fedveil.message import Answer, Question, Record, Refused
from fedveil.recipe import Recipe
from fedveil.seeds import Seed
from fedveil.task import Task
from fedveil.updates.local import Local
from fedveil.updates.raw import FedAvg, FedProx, FedSGD, QFedAvg, Scaffold
from fedveil.updates.server import Merge, Server

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "About",
    "Answer",
    "Answers",
    "Cohort",
    "Crowd",
    "Data",
    "FedAvg",
    "FedProx",
    "FedSGD",
    "Federation",
    "Ledger",
    "Local",
    "Merge",
    "Method",
    "QFedAvg",
    "Question",
    "Recipe",
    "Record",
    "Refused",
    "Result",
    "Row",
    "Sampling",
    "Scaffold",
    "Seed",
    "Server",
    "Split",
    "State",
    "Task",
    "load",
    "run",
    "split",
]
