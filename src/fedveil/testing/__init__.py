"""Checks for methods and codecs of one's own: `check_method` and `check_codec`, as scikit-learn's `check_estimator`."""

from fedveil.testing.codecs import CODEC_CHECKS, check_codec
from fedveil.testing.methods import METHOD_CHECKS, check_method
from fedveil.testing.toys import Trial, toy_task, trial

__all__ = ["CODEC_CHECKS", "METHOD_CHECKS", "Trial", "check_codec", "check_method", "toy_task", "trial"]
