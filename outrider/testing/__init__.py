"""What the author of a drafter, a verifier or a model needs to test it. Installed with the package.

contract   `check_drafter`: the whole contract of a drafter, tried out
toy        small models with exact logits, for tests that must not depend on weights
oracle     the distribution of plain decoding by enumeration, in rational arithmetic
stubs      simple drafters: always right, always wrong, right with a known probability
"""

from outrider.testing.contract import check_drafter
from outrider.testing.stubs import Echo, Noisy, Wrong
from outrider.testing.toy import ToyModel

__all__ = ["Echo", "Noisy", "ToyModel", "Wrong", "check_drafter"]
