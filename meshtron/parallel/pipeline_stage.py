"""One stage under torch's pipeline schedules."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves, tree_map_only


class ScheduledStage(PipelineStage):
    """torch's stage, with the gaps closed that meshtron meets.

    The weight pass of zero-bubble schedules writes ``.grad`` without firing autograd's hooks, so it is reported;
    torch 2.11 opens a connection from a rank to itself for V-shaped schedules, which gloo refuses. What a
    stage hands on need not be contiguous, but can be sent only if it is. Between the input pass and the weight pass
    torch 2.11 holds autograd functions written in Python (the fused loss) too weakly, so their graph is kept.

    Compiled and recomputed layers give gradients of inputs and weights in one piece. Split, the weight pass would run
    such a layer once more (a compiled one), or once a weight (a recomputed one), and torch's compiler frees what it
    needs. Without ``split_backward`` the input pass does all, and the weight pass nothing.
    """

    after_weight_pass: list[Callable[[nn.Module], None]]
    split_backward: bool

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward or not self.split_backward, last_backward)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        if not self.split_backward:
            return
        super().backward_weight_one_chunk(*args, **kwargs)
        for report in self.after_weight_pass:
            report(self.submod)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return _contiguous(super().forward_maybe_with_nosync(*args, **kwargs))

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, *args: Any, **kwargs: Any) -> Any:
        outputs = tree_leaves(bwd_kwargs["stage_output"]) if backward_type == "input" else []
        graph = [output.view_as(output).grad_fn for output in outputs]
        gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kwargs)
        if groups:
            groups[0]["graph"] = graph  # dropped with the group, after its weight pass
        return _contiguous(gradients), groups

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        me = dist.get_rank(self.group)
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != me]


def _contiguous(values: Any) -> Any:
    return tree_map_only(Tensor, Tensor.contiguous, values)
