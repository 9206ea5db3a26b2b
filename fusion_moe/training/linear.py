"""Linear layers over groups of rows, trained in floating point."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from .. import recipe
from ..definitions.operations import restored
from ..definitions.tensor_lists import flat
from ..errors import DtypeError, OptionError, ShapeError
from ..ir import dtype_name
from ..nn import checks
from . import splits
from .checks import need_apart, need_buffer, need_scales
from .delayed import Delayed
from .grouped_parameters import GroupedParameters
from .held import Held
from .stages import ROWS, Call, Operand, Stage, call
from .tracked import Effect, tracked

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class GroupedLinear(GroupedParameters):
    """G linear layers, each on its own run of rows: for row r of group g, weight[g] @ row +
    bias[g].

    G is num_groups, K in_features, N out_features; M rows. Parameters, all of one float dtype:

        weight0 .. weight{G-1}  [N, K] each, or with single_grouped_weight  weight [G, N, K]
        bias0 .. bias{G-1}      [N] each, or with single_grouped_bias       bias [G, N]; None
                                without bias

    Weights start kaiming-uniform with a = sqrt(5), biases at zero. weight0 .. are views of one
    buffer, so that a product takes them as [G, N, K] without a copy. Other parameters may be
    registered in their places; each call copies them, unless they too are contiguous neighbours in
    one storage. State dicts of either form load. On device="meta" nothing is allocated; parameters
    that get memory later, or that a state dict assigns, are moved into one buffer, unless they are
    parts of a larger storage, or in shared memory. In a state dict each has a storage of its own,
    on the same memory, for tools that take tensors of one storage for one tensor.

    The result has autocast's dtype if autocast is on, otherwise the weights'. Products follow the
    recipe that `fusion_moe.autocast` has put in force, if any (ShapeError for sizes that it does
    not take). Gradients are computed only for tensors that require one; those of weight0 .. are
    slices of one [G, N, K].

    Under torch.compile a call is part of the graph, unless it writes: out, grad_input, main_grad
    and delayed gradients break the graph.

    Args:
        num_groups: G.
        in_features: K.
        out_features: N.
        bias: whether there are biases.
        device: of the parameters.
        dtype: of the parameters, a float.
        accumulate_into_main_grad: the backward adds a weight's gradient to `weight.main_grad` (or
            to what `weight.get_main_grad()` returns), a float32 or bfloat16 tensor of the weight's
            shape that must exist in the forward; if `weight.overwrite_main_grad`, it overwrites it.
            If a weight has an attribute `grad_added_to_main_grad`, it is set to True, and
            autograd's hooks see a gradient without meaning (zeros if `weight.zero_out_wgrad`); for
            any other weight they see None.
        single_grouped_weight: one parameter weight [G, N, K].
        single_grouped_bias: one parameter bias [G, N].
        delay_wgrad_compute: the backward leaves out the gradients of weights; `backward_dw`
            computes those of the oldest backward.
        scale_bias: with a bias, row r gets scales[r] * bias[g]; scales may require a gradient.
        init_method: fills a weight [N, K] in place, in place of kaiming-uniform.
        return_bias: a call adds no bias, and returns (result, biases) for the caller to add: a
            list of G [N] in the result's dtype, with their gradients; an empty list without bias.
            Not with scale_bias, and not in a `Sequential`.
        save_original_input: under a recipe, the backward quantizes x once more for the weights'
            gradients, with the same bits, in place of a quantized copy that the forward saves: less
            memory where others keep x anyway.

    Copies of weights that `is_first_microbatch` keeps are in no state dict, and go when the module
    is copied or pickled.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
        return_bias: bool = False,
        init_method: Callable[[Tensor], object] | None = None,
        save_original_input: bool = False,
    ):
        for name, n in (
            ("num_groups", num_groups),
            ("in_features", in_features),
            ("out_features", out_features),
        ):
            if not isinstance(n, int) or n <= 0:
                raise OptionError(
                    f"{name} = {n!r}", expected="a positive integer", where="GroupedLinear"
                )
        if scale_bias and return_bias:
            raise OptionError(
                "scale_bias and return_bias",
                expected="one of them",
                todo="scale what is returned",
                where="GroupedLinear",
            )
        dtype = dtype or torch.get_default_dtype()
        if dtype not in _DTYPES:
            raise DtypeError(
                f"dtype = {dtype}",
                expected=f"one of {', '.join(map(str, _DTYPES))}",
                where="GroupedLinear",
            )
        super().__init__(num_groups)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.scale_bias, self.return_bias = scale_bias and bias, return_bias
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.save_original_input = save_original_input
        self.delayed = Delayed() if delay_wgrad_compute else None
        self.held = Held()
        self.init_method = init_method or partial(nn.init.kaiming_uniform_, a=sqrt(5))
        self.add_grouped(
            "weight", (out_features, in_features), single_grouped_weight, device=device, dtype=dtype
        )
        self.add_grouped(
            "bias", (out_features,), single_grouped_bias, not bias, device=device, dtype=dtype
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New weights by `init_method`, one group after another; biases of zero."""
        with torch.no_grad():
            for weight in self.each("weight"):
                self.init_method(weight)
            for bias in self.each("bias") if self.use_bias else ():
                bias.zero_()

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether weight gradients wait for `backward_dw`."""
        return self.delayed is not None

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's; also sets `skip_backward_post_hook` on a weight whose gradient is delayed,
        for code that would reduce gradients.
        """
        super().register_parameter(name, param)
        if name.startswith("weight"):
            self._mark(param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for key in self.keys("weight"):
            self._mark(self._parameters.get(key))

    def _mark(self, weight: nn.Parameter | None) -> None:
        if weight is not None and self.__dict__.get("delayed") is not None:
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def forward(
        self,
        x: Tensor,
        split_sizes: splits.SplitSizes | None = None,
        scales: Tensor | None = None,
        *,
        offs: Tensor | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """x [..., K], M rows sorted by group -> [..., N], and with return_bias also the biases.

        split_sizes: int[G] or G numbers, the rows of each group; or offs: i32[G], where the runs
        end. Rows past the last run give zeros. scales: float[...], one for each row, with
        scale_bias. out [..., N], grad_input [..., K]: contiguous buffers, of the result's dtype and
        x's, into which the result and x's gradient are written. Their rows past the last run keep
        what they hold. Autograd gets grad_input itself as x's gradient, unless x is a leaf: do not
        write into it while that is in use.

        is_first_microbatch: under the recipe Float8BlockScaling, True keeps the quantized weights
        of this call, False reads those of the last such call, whatever the weights are now; None
        quantizes them. It breaks the graph under torch.compile, and changes nothing else.

        GroupsError, ShapeError, DtypeError, DeviceError or UnsupportedError for arguments that do
        not fit, before memory is written.
        """
        where, lead = type(self).__name__, x.shape[:-1]
        checks.need_rows("x", x, self.in_features, where)
        ends = splits.ends_of(split_sizes, offs, self.num_groups, x, where)
        stage = self.stage(x, ends, scales, is_first_microbatch)
        program = call(x.reshape(-1, self.in_features), [stage])
        effects = self.effects(program)
        if out is None and grad_input is None and not effects:
            y = program.run()
        else:
            self._check_buffers(x, program.inputs, out, grad_input)
            out, grad_input = [
                t if t is None else t.view(-1, t.shape[-1]) for t in (out, grad_input)
            ]
            y = tracked(program, effects, ends, out, grad_input, x.is_leaf, where)
        y = restored(y, lead)
        if not self.return_bias:
            return y
        return y, [bias.to(y.dtype) for bias in self.each("bias")] if self.use_bias else []

    def stage(
        self,
        x: Tensor,
        ends: Tensor,
        scales: Tensor | None,
        is_first_microbatch: bool | None = None,
    ) -> Stage:
        """The stage that the layer adds to a program: ends i32[G], scales float[...] or None, for
        rows like those of x.
        """
        where, groups = type(self).__name__, self.num_groups
        weight = Operand(self.grouped("weight"), (groups, self.out_features, self.in_features))
        bias = (
            Operand(self.grouped("bias"), (groups, self.out_features))
            if self.use_bias and not self.return_bias
            else None
        )
        if scales is not None and not self.scale_bias:
            raise ShapeError(
                "scales",
                expected="none",
                todo="a GroupedLinear with a bias and scale_bias=True takes them",
                where=where,
            )
        column = Operand(need_scales(scales, x, where), (ROWS,)) if self.scale_bias else None
        for name, operand in (("weight", weight), ("bias", bias)):
            if operand is not None:
                first = operand.tensor[0] if isinstance(operand.tensor, tuple) else operand.tensor
                checks.need_float(name, first, where)
                checks.need_device(name, first, x.device, where)
        dtype, by = dtype_name(self.compute_dtype(x.device)), recipe.current()
        held: tuple[Operand, ...] = ()
        if is_first_microbatch is not None and isinstance(by, recipe.Float8BlockScaling):
            held = self.held.parts(weight, dtype, by, is_first_microbatch, where)
        return Stage(
            "linear",
            self.in_features,
            (weight, Operand(ends, (groups,)), bias, column, *held),
            (dtype, recipe.activation_format(self.save_original_input)),
        )

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the result: autocast's if autocast is on, otherwise the weights'."""
        dtype, kind = getattr(self, self.keys("weight")[0]).dtype, device.type
        # torch.compile of torch 2.10 cannot trace is_autocast_available
        on = kind != "meta" and torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if on and dtype != torch.float64 else dtype

    def effects(self, call: Call) -> dict[int, Effect]:
        """What the backward of a program with this layer does beside returning gradients, by the
        weight's place among the call's arguments: adds to `main_grad`, or delays the weight's
        gradient. {} without either.
        """
        weight = self.grouped("weight")
        params = weight if isinstance(weight, tuple) else (weight,)
        if not (
            (self.accumulate_into_main_grad or self.delayed)
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in params)
        ):
            return {}
        return {call.place(weight): Effect(params, self.accumulate_into_main_grad, self.delayed)}

    def _check_buffers(
        self, x: Tensor, inputs: Any, out: Tensor | None, grad_input: Tensor | None
    ) -> None:
        where, result = type(self).__name__, (*x.shape[:-1], self.out_features)
        buffers = []
        for name, t, shape, dtype in (
            ("out", out, result, self.compute_dtype(x.device)),
            ("grad_input", grad_input, x.shape, x.dtype),
        ):
            if t is not None:
                need_buffer(name, t, shape, dtype, x.device, where)
                buffers.append((name, t))
        others = [("x", inputs[0]), *(("an operand", t) for t in flat(inputs[1:])[0])]
        need_apart(buffers, others, where)

    def backward_dw(self) -> None:
        """Computes the weight gradients of the oldest backward that left them out, and adds them to
        `grad` or to `main_grad`.

        Frees what was saved for them, then calls each registered hook once. UnsupportedError if no
        backward waits, or if what it read, an input or the gradient of the result, was written in
        place since.
        """
        self._need_delayed("backward_dw").run(type(self).__name__)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        """hook() is called at the end of each `backward_dw`."""
        self._need_delayed("a hook of backward_dw").hooks.append(hook)

    def _need_delayed(self, text: str) -> Delayed:
        if self.delayed is None:
            raise OptionError(text, expected="delay_wgrad_compute=True", where=type(self).__name__)
        return self.delayed

    def extra_repr(self) -> str:
        """For print(model)."""
        sizes = (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )
        flags = {
            "accumulate_into_main_grad": self.accumulate_into_main_grad,
            "single_grouped_weight": self.single["weight"],
            "single_grouped_bias": self.single["bias"],
            "delay_wgrad_compute": self.delay_wgrad_compute,
            "scale_bias": self.scale_bias,
            "return_bias": self.return_bias,
            "save_original_input": self.save_original_input,
        }
        return sizes + "".join(f", {name}=True" for name, on in flags.items() if on)
