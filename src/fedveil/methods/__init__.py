"""Federated learning methods. A recipe can name every method once this package is imported."""
# ruff: noqa: F401

import fedveil.methods.fedavg  # `fedveil list methods` begins with it

# isort: split
import fedveil.methods.baffle.baffle
import fedveil.methods.baffle.epochs
import fedveil.methods.feddyn
import fedveil.methods.fedprox
import fedveil.methods.fedsgd
import fedveil.methods.presets
import fedveil.methods.qfedavg
import fedveil.methods.scaffold
import fedveil.methods.surrogates.feddm
import fedveil.methods.surrogates.fedlap
