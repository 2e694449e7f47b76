"""Read from the graph of a loss how it is reduced: over how many rows, as a mean or as a sum, times which numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEAN = 1  # a loss's `reduction` in torch's graph; 2 is a sum
MAX_DEPTH = 8  # operations between the reduction and what backward is called with
DDP_SINK = "_DDPSinkBackward"  # of a DDP model with find_unused_parameters, which is the Trainer's default
LOSSES = ("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy")


@dataclass(frozen=True)
class Reduction:
    """A loss that is the mean or the sum of a tensor's rows, times a number."""

    kind: tuple[str, tuple[int, ...]]  # the operation, and the shape of a row
    num_rows: int
    factor: float
    is_mean: bool

    @property
    def is_mean_of_rows(self) -> bool:
        """Return whether it is their plain mean, also if a sum was divided by their number."""
        return self.is_mean or abs(self.factor * self.num_rows - 1) < 1e-6


def find_reduction(loss: Any) -> Reduction | None:
    """Return the reduction that made a loss, from its graph; None if there is none to be seen.

    Of the graph only shapes and numbers are read: a saved tensor may be computed anew when it is.
    """
    node, output, factor = loss.grad_fn, loss.output_nr, 1.0
    for _ in range(MAX_DEPTH):
        if node is None:
            return None
        name, inputs = node.name(), [one for one in node.next_functions if one[0] is not None]
        if name == DDP_SINK and len(node.next_functions) > output:  # all outputs of the model pass it
            node, output = node.next_functions[output]
            continue
        if len(inputs) != 1:
            return None  # also if it is multiplied with what is trained, too
        if name.startswith(("MeanBackward", "SumBackward", *LOSSES)):
            is_mean = node._saved_reduction == MEAN if name.startswith(LOSSES) else name.startswith("Mean")
            num_rows, *row = inputs[0][0]._input_metadata[0].shape or (1,)
            return Reduction((name, tuple(row)), int(num_rows), factor, is_mean)
        if name.startswith(("DivBackward", "MulBackward")):
            other = node._saved_other
            if other is None or (hasattr(other, "device") and (other.device.type != "cpu" or other.numel() != 1)):
                return None
            is_divided, number = name.startswith("Div"), float(other)
            if is_divided and number == 0.0:
                return None
            factor = factor / number if is_divided else factor * number
        node, output = inputs[0]
    return None
