"""Forward passes without padding: from the first block to the last, the tokens of a batch stand in one row.

Texts of a batch differ in length, and most operations of a block (products with weights, norms, activations) work token
by token. Only attention needs to know which tokens form one text: it takes them in bins, each with several short texts
or one long text, or, in half precision on a GPU, in PyTorch's attention over texts of variable length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch import Tensor, nn

from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import DROPOUTS, HIDDEN, find_block_chains, get_hidden, replace_forward, trace_calls
from fedspan.models.layout import Padded, TokenLayout
from fedspan.models.operators import Linear
from fedspan.models.precision import has_narrow_weights

_ATTENTION = "fedspan_unpadded"

_CURRENT: ContextVar[TokenLayout | None] = ContextVar("layout", default=None)


@cache
def import_variable_attention() -> Callable[..., Any] | None:
    """Import PyTorch's attention over texts of variable length; None: PyTorch before 2.10.

    The import takes seconds (it loads ``torch._dynamo``), and only GPUs have this attention.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def get_current_layout() -> TokenLayout | None:
    """Return the layout of this thread's current forward pass, if it runs without padding."""
    return _CURRENT.get()


def _run_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    layout = get_current_layout()
    if layout is None or query.shape[:3:2] != (1, layout.places) or key.shape[2] != layout.places:
        raise Padded("Transformers does not allow its attention to be replaced")
    if layout.variable:
        return _attend_variable(layout, module, query, key, value, options), None
    if layout.fused:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        forward = sdpa_attention_forward
    else:
        forward = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if forward is None:
        raise Padded("Transformers does not allow its attention to be replaced")
    return layout.attend(forward, module, query, key, value, attention_mask, options), None


def _attend_variable(
    layout: TokenLayout, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Tensor:
    """Run attention of a scale, causality and a window, or raise: (1, heads, P, d) -> (1, P, heads, d)."""
    others = ("softcap", "position_bias", "s_aux")
    attend = import_variable_attention()
    if attend is None or options.get("dropout") or any(options.get(name) is not None for name in others):
        raise Padded("its attention has parts that attention over texts of variable length lacks")
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = options.get("sliding_window")
    reach = -1 if window is None else window - 1
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    ends, longest = layout.text_ends
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    output = attend(
        *(q, k, v, ends, ends, longest, longest),
        scale=options.get("scaling"),
        window_size=(reach, 0 if causal else reach),
        **grouped,  # PyTorch 2.11 has no such argument: bins take its place
    )
    assert isinstance(output, Tensor)
    return output[None]


def _mask(*args: Any, **options: Any) -> Any:
    """Make the additive mask of the padded batch, which the bins' masks come from.

    Transformers would leave it out where no text is padded, for which the host has to wait for the device.
    """
    layout = get_current_layout()
    if layout is not None and layout.variable:
        return None
    from transformers.masking_utils import eager_mask, sdpa_mask

    if layout is not None and layout.same_attention and layout.fused:
        return sdpa_mask(*args, **options)
    return eager_mask(*args, **{**options, "allow_is_bidirectional_skip": False})


def _register_attention() -> None:
    """Register the attention under its name in Transformers; again has no effect."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _run_attention)
    AttentionMaskInterface.register(_ATTENTION, _mask)


class Unpadded:
    """The blocks of an adapted model that batches can pass through without padding.

    Raises:
        Padded: If the model needs its padding, as far as its modules show.
    """

    def __init__(self, adapted: AdaptedModel) -> None:
        model = adapted.model
        self._config: Any = getattr(model, "config", None)
        if getattr(model, "main_input_name", None) != "input_ids":
            raise Padded("the model does not take tokens")
        if getattr(self._config, "_attn_implementation", None) not in ("eager", "sdpa"):
            raise Padded("attention is not Transformers' eager or sdpa one")
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            raise Padded("activations are computed again in the backward pass (gradient checkpointing)")
        if any(isinstance(module, DROPOUTS) and module.p > 0 for module in model.modules()):
            raise Padded("the model has dropout")
        _register_attention()
        try:
            _, calls = trace_calls(model)
        except Exception as error:  # a model may raise anything on a batch that it does not expect
            raise Padded(f"a forward pass for inspection failed ({type(error).__name__}: {error})") from error
        chains = find_block_chains(model, calls)
        if not chains:
            raise Padded("the model has no list of blocks that hand on hidden states (examples, tokens, features)")
        self._blocks = max(chains, key=lambda chain: sum(p.numel() for block in chain for p in block.parameters()))
        names = {module: name for name, module in model.named_modules()}
        inside = tuple(f"{names[block]}." for block in self._blocks)
        for path in (*adapted.extras, *adapted.buffers):
            if path.startswith(inside) and path.rpartition(".")[0] not in adapted.layers:
                raise Padded(f"{path} trains inside a block")
        for path, layer in adapted.layers.items():
            if path.startswith(inside) and not isinstance(layer.operator, Linear):
                raise Padded(f"{path} is not a linear layer")

        is_half_on_gpu = adapted.device.type == "cuda" and has_narrow_weights(model)
        self.variable = is_half_on_gpu and import_variable_attention() is not None
        """Whether attention takes texts of variable length, which PyTorch has for GPUs in half precision."""

    @contextmanager
    def within(self, layout: TokenLayout) -> Generator[TokenLayout]:
        """Run forward passes of a batch without padding within this context, which yields the layout.

        Raises:
            Padded: If a forward pass within the context can't run without padding.
        """
        attention = self._config._attn_implementation
        layout.fused, layout.variable = attention == "sdpa", self.variable
        token = _CURRENT.set(layout)
        try:
            with ExitStack() as contexts:
                for block in self._blocks:
                    last = block is self._blocks[-1]
                    contexts.enter_context(replace_forward(block, _wrap_packed_forward(block.forward, layout, last)))
                self._config._attn_implementation = _ATTENTION
                yield layout
        finally:
            self._config._attn_implementation = attention
            _CURRENT.reset(token)


def _wrap_packed_forward(forward: Callable[..., Any], layout: TokenLayout, last: bool) -> Callable[..., Any]:
    """Wrap a block's forward to pack inputs that are still padded; the last block's output is padded again."""

    def run_packed(*args: Any, **options: Any) -> Any:
        hidden = get_hidden(args, options)
        if hidden is None or hidden.ndim != 3:
            raise Padded("a block is given no hidden states (examples, tokens, features)")
        if hidden.shape[:2] != (1, layout.places):
            if hidden.shape[:2] != (len(layout.lengths), layout.tokens):
                raise Padded(f"a block is given hidden states of shape {tuple(hidden.shape)}")
            hidden = layout.pack(hidden)
        packed_options = {name: layout.pack_argument(value) for name, value in options.items() if name != HIDDEN}
        if args:
            result = forward(hidden, *(layout.pack_argument(value) for value in args[1:]), **packed_options)
        else:
            result = forward(**{HIDDEN: hidden}, **packed_options)
        if not last:
            return result
        if isinstance(result, tuple):
            return (layout.unpack(result[0]), *result[1:])
        return layout.unpack(result)

    return run_packed
