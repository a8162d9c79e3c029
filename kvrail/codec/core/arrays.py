"""Types of the arrays that codecs pass about."""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.unsignedinteger]
"""Elements as they are stored."""
