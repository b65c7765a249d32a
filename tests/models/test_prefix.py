"""Which blocks of which architecture can be skipped, and that skipping them changes nothing."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fedspan.models.adapted import AdaptedModel
from fedspan.models.prefix import FrozenPrefix, NoPrefix
from helpers.tiny_families import make_model

_SIZES: dict[str, Any] = {
    **{"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"initializer_range": 0.3, "pad_token_id": 0},
}
_DECODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 4, "bos_token_id": 1, "eos_token_id": 2}
_STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IMAGE: dict[str, Any] = {"image_size": 8, "patch_size": 4}
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "bert": make_model("Bert", "ForSequenceClassification", **_SIZES, **_STILL),
    "electra": make_model("Electra", "ForSequenceClassification", **_SIZES, **_STILL, embedding_size=8),
    "deberta": make_model(
        "DebertaV2",
        "ForSequenceClassification",
        **{**_SIZES, **_STILL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "modernbert": make_model("ModernBert", "ForSequenceClassification", **_SIZES),
    "mistral": make_model("Mistral", "ForCausalLM", **_DECODER, sliding_window=3),
    "gemma2": make_model("Gemma2", "ForCausalLM", **_DECODER, sliding_window=3),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_DECODER, sliding_window=3)),
    "phi3": make_model("Phi3", "ForCausalLM", **_DECODER),
    "mixtral": make_model("Mixtral", "ForCausalLM", **_DECODER, num_local_experts=3, num_experts_per_tok=2),
    "gptneox": make_model("GPTNeoX", "ForCausalLM", **_SIZES),
    "bloom": make_model(
        "Bloom", "ForCausalLM", vocab_size=20, hidden_size=16, n_layer=4, n_head=4, initializer_range=0.3
    ),
    "deit": make_model("DeiT", "ForImageClassification", **_SIZES, **_STILL, **_IMAGE),
    "dinov2": make_model("Dinov2", "ForImageClassification", **_SIZES, **_STILL, **_IMAGE, mlp_ratio=2),
    "t5": make_model("T5", "EncoderModel", **_SIZES, d_kv=4, dropout_rate=0.0),
    "albert": make_model("Albert", "ForSequenceClassification", **_SIZES, **_STILL, embedding_size=8),
}
NONE = {
    "t5": "no list of blocks",  # the first block's relative positions go on to the others
    "albert": "no list of blocks",  # one block, many times
}


def made(kind: str) -> tuple[AdaptedModel, list[str]]:
    """A model without target layers, and the paths of its four blocks."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = MODELS[kind]().eval()
    lists = {name: len(one) for name, one in model.named_modules() if isinstance(one, nn.ModuleList)}
    path = next(name for name, size in lists.items() if size == 4 or kind == "albert")
    return AdaptedModel(model, {}, {}), [f"{path}.{number}" for number in range(lists[path])]


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(2)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.rand(3, 3, 8, 8, generator=rng)}
    ids = torch.randint(3, 20, (3, 6), generator=rng)
    mask = torch.ones(3, 6, dtype=torch.int64)
    ids[1, 4:], mask[1, 4:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in NONE])
@pytest.mark.parametrize("first", [1, 3])
def test_hidden_states_that_are_fed_give_the_same_logits(kind: str, first: int) -> None:
    adapted, blocks = made(kind)
    prefix = FrozenPrefix.find(adapted, {blocks[first]})
    assert prefix is not None, FrozenPrefix.explain_refusal(adapted, {blocks[first]})
    assert len(prefix.paths) == first + 1
    model, batch = adapted.model, batch_of(adapted.model)
    own = [vars(module).get("forward") for module in model.modules()]
    with torch.no_grad():
        wanted = model(**batch).logits
        with prefix.record() as recording:
            model(**batch)
        with prefix.feed(recording.hidden):
            assert torch.equal(model(**batch).logits, wanted)
        with prefix.feed(recording.hidden.flip(2)):
            assert not torch.allclose(model(**batch).logits, wanted, rtol=1e-2)
    assert own == [vars(module).get("forward") for module in model.modules()]


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in NONE])
def test_what_is_used_in_the_first_block_leaves_nothing_to_skip(kind: str) -> None:
    adapted, blocks = made(kind)
    names = [name for name, one in adapted.model.named_modules() if list(one.parameters())]
    inside = next(name for name in names if name.startswith(f"{blocks[0]}."))
    assert FrozenPrefix.find(adapted, {inside, blocks[2]}) is None
    assert f"{inside} changes" in str(FrozenPrefix.explain_refusal(adapted, {inside, blocks[2]}))


@pytest.mark.parametrize(("kind", "reason"), NONE.items())
def test_architectures_that_have_none(kind: str, reason: str) -> None:
    adapted, blocks = made(kind)
    with pytest.raises(NoPrefix, match=reason):
        FrozenPrefix.search(adapted, {blocks[-1]})


def test_what_trains_decides_what_there_is_to_skip_to() -> None:
    adapted, _ = made("bert")
    assert FrozenPrefix.explain_refusal(adapted, set()) == "nothing in the model is trained"
    # The last block is where hidden states can be given to the model, though nothing in it changes
    adapted, blocks = made("bert")
    prefix = FrozenPrefix.search(adapted, {"classifier"})
    assert len(prefix.paths) == len(blocks)


def test_models_that_have_no_prefix_to_skip() -> None:
    adapted, blocks = made("bert")
    prefix = FrozenPrefix.search(adapted, {blocks[2]})
    with pytest.raises(NoPrefix, match="was not called"), prefix.record():
        pass
    adapted, blocks = made("gemma2")
    assert "lm_head changes" in str(FrozenPrefix.explain_refusal(adapted, {"lm_head", blocks[3]}))
    assert FrozenPrefix.explain_refusal(adapted, {"model.norm", blocks[3]}) is None
    adapted = AdaptedModel(nn.Sequential(nn.Linear(2, 2)), {}, {})
    assert "neither tokens nor images" in str(FrozenPrefix.explain_refusal(adapted, {"0"}))
