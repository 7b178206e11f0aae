"""What is promised of privacy and proved: the secure sum, and differential privacy of noised gradients."""

from __future__ import annotations

from fedveil.privacy.secagg.identity import Identities
from fedveil.privacy.secagg.protocol import SecureSum, Sum

__all__ = ["Identities", "SecureSum", "Sum"]
