"""What is promised of privacy and proved: the secure sum, and differential privacy of noised gradients."""

from __future__ import annotations

from fedveil.core.identity import Identities
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.privacy.secagg.total import Sum

__all__ = ["Identities", "SecureSum", "Sum"]
