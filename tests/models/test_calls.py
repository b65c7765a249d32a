"""Modules that a forward pass calls: chains of blocks, the tiny batch, and what tracing leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fedspan.models.calls import (
    build_tiny_batch,
    enter_evaluation,
    find_block_chains,
    has_own_decoder_inputs,
    replace_forward,
    trace_calls,
)


class Block(nn.Module):
    """Adds a linear map, and returns a tuple if asked to."""

    def __init__(self, outputs: int = 4, width: int | None = None) -> None:
        super().__init__()
        self.linear, self.width = nn.Linear(4, outputs), width

    def forward(self, hidden_states: Tensor, bias: Tensor | None = None) -> Any:
        result = self.linear(hidden_states) + (0 if bias is None else bias)
        return result if self.width is None else (result, bias)[: self.width]


class Reader(nn.Module):
    """Reads tokens, passes them through its blocks in some order, and counts its passes."""

    main_input_name = "input_ids"

    def __init__(self, *blocks: nn.Module, order: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(9, 4), nn.ModuleList(blocks)
        self.dropout, self.order = nn.Dropout(0.5), order or tuple(range(len(blocks)))
        self.config = SimpleNamespace()

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Any = self.embedding(input_ids)
        for number in self.order:
            hidden = self.blocks[number](hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.dropout(hidden)


def chains(model: nn.Module) -> list[list[nn.Module]]:
    return find_block_chains(model, trace_calls(model)[1])


def test_blocks_that_pass_on_hidden_states_are_a_chain_in_the_order_of_their_calls() -> None:
    model = Reader(Block(), Block(width=1), Block(), order=(2, 0))
    assert chains(model) == [[model.blocks[2], model.blocks[0]]]  # a block that is not called is none of it


@pytest.mark.parametrize(
    "model",
    [
        Reader(Block(), order=(0, 0)),  # called twice
        Reader(Block(outputs=1), nn.Identity()),  # of another shape
        Reader(),
    ],
)
def test_what_is_no_chain(model: nn.Module) -> None:
    assert chains(model) == []


def test_hidden_states_that_change_between_two_blocks_end_a_chain() -> None:
    model = Reader(Block(), Block())
    first, second = model.blocks
    with replace_forward(first, lambda hidden: Block.forward(first, hidden)):  # type: ignore[arg-type]
        assert chains(model) == [[first, second]]
    model.forward = lambda input_ids: second(first(model.embedding(input_ids)) * 2)  # type: ignore[method-assign]
    assert chains(model) == []


def test_tracing_leaves_modes_and_hooks_as_they_were() -> None:
    model = Reader(Block(), Block())
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    entered, calls = trace_calls(model)
    assert sorted(entered[module] for module in (model, model.embedding, *model.blocks)) == [
        entered[module] for module in (model, model.embedding, *model.blocks)
    ]
    assert [len(calls[block]) for block in model.blocks] == [1, 1]
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_evaluation_ends_with_an_error_in_it() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 3)).train()
    model[1].eval()

    def fail() -> None:
        with enter_evaluation(model):
            assert not model[0].training
            assert not torch.is_grad_enabled()
            raise ValueError("inner")

    with pytest.raises(ValueError, match="inner"):
        fail()
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert torch.is_grad_enabled()


def test_a_replaced_forward_is_restored_also_one_of_its_own() -> None:
    module = nn.Linear(2, 3)
    with replace_forward(module, lambda x: x):
        assert module(5) == 5
        with replace_forward(module, lambda x: -x):
            assert module(5) == -5
        assert module(5) == 5
    assert "forward" not in vars(module)
    assert module(torch.zeros(1, 2)).shape == (1, 3)


def test_tiny_batches_are_what_a_model_reads() -> None:
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 4}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=9, **small))
    assert build_tiny_batch(bert)["input_ids"].tolist() == [[1, 1, 1]] * 2
    vit = transformers.ViTModel(transformers.ViTConfig(image_size=(6, 4), patch_size=2, num_channels=1, **small))
    assert build_tiny_batch(vit)["pixel_values"].shape == (2, 1, 6, 4)
    sizes = {"d_model": 8, "d_ff": 4, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    assert has_own_decoder_inputs(t5)
    assert not has_own_decoder_inputs(bert)
    batch = build_tiny_batch(t5)
    assert batch["input_ids"].tolist() == batch["decoder_input_ids"].tolist() == [[1, 1, t5.config.eos_token_id]] * 2
    for model in (bert, vit, t5):
        trace_calls(model)


def test_a_model_of_something_else_is_refused() -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="the model takes neither tokens nor images"):
        trace_calls(model)
