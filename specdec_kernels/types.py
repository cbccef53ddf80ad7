"""Result types shared by the ops and the decoding loop."""

from typing import NamedTuple

from torch import Tensor


class Verification(NamedTuple):
    """What a verification op decided, in fixed shapes padded with −1.

    Attributes:
        output_ids: ``(B, N+1) int64``; the ids of the accepted nodes in path order, then the final token (recovered or
            bonus). ``num_accepted + 1`` ids are valid. A row that could not be judged (NaN) holds only −1.
        num_accepted: ``(B,) int32``; accepted nodes below the root.
        accepted: ``(B, N) int32``; their node ids in path order, as `kv_compact_` takes them.
    """

    output_ids: Tensor
    num_accepted: Tensor
    accepted: Tensor
