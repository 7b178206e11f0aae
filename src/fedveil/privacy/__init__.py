"""What is promised of privacy and proved: the secure sum, and differential privacy of noised gradients."""

from __future__ import annotations

from fedveil.privacy.identity import Identities
from fedveil.privacy.secagg import SecureSum, Sum

__all__ = ["Identities", "SecureSum", "Sum"]
