"""Logits of Hugging Face folders at every layout, what a rank reads of them, and tied heads."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from meshtron.errors import CheckpointError
from meshtron.hf.config import HF_FAMILIES
from meshtron.hf.convert import import_hf
from meshtron.mesh import Layout
from meshtron.testing import run_ranks
from tests.hf_models import CASES, VOCAB, logits_of, model_of, tensors_in, tokens_of, write
from tests.hf_ranks import load_shard, logits_at, logits_of_all

TOKENS = tokens_of()


LAYOUTS = ["1x1x1", "1x1x2", "1x1x3", "2x1x1", "2x1x2", "2x1x3", "4x1x1", "4x1x2", "4x1x3"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_those_of_transformers_at_every_layout(hf_folders: dict[str, Path], layout: str) -> None:
    parsed = Layout.parse(layout)
    cases = [case for case in CASES if model_of(case).config.num_key_value_heads % parsed.tp == 0]
    configs = [model_of(case).config for case in cases]
    assert {(config.model_type, config.tie_word_embeddings) for config in configs} == {
        (family, tied) for family in HF_FAMILIES for tied in (True, False)
    }
    ranks = run_ranks(logits_of_all, parsed.world_size, [hf_folders[case] for case in cases], layout, TOKENS)
    for number, case in enumerate(cases):
        expected, columns = logits_of(case, TOKENS), set()
        for found in (rank[number] for rank in ranks):
            if found is not None:
                held, logits = found
                columns |= set(held)
                torch.testing.assert_close(
                    logits,
                    expected[..., held.start : held.stop],
                    atol=1e-4,
                    rtol=0,
                    msg=lambda m, c=case: f"{c}: {m}",
                )
        assert columns == set(range(VOCAB))


def test_tied_heads_that_are_there(tmp_path: Path) -> None:
    folder = write("llama3.2", tmp_path / "a")
    tensors = tensors_in(folder)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    (found,) = run_ranks(logits_at, 1, folder, "1x1x1", TOKENS)
    torch.testing.assert_close(found[1], logits_of("llama3.2", TOKENS), atol=1e-4, rtol=0)
    import_hf(folder, tmp_path / "in")
    tensors["lm_head.weight"][100, 3] += 1
    save_file(tensors, folder / "model.safetensors")
    differs = r"lm_head\.weight differs from model\.embed_tokens\.weight"
    with pytest.raises(AssertionError, match=differs):
        run_ranks(logits_at, 1, folder, "1x1x1", TOKENS)
    with pytest.raises(CheckpointError, match=differs):
        import_hf(folder, tmp_path / "in2")


def test_a_rank_reads_and_holds_about_its_own_shard(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in transformers.LlamaForCausalLM(config).named_parameters()}
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 380e6
    for own, read, peak in run_ranks(load_shard, 4, tmp_path):
        print(f"file {size / 1e6:.0f} MB, shard {own / 1e6:.0f}, read {read / 1e6:.0f}, peak {peak / 1e6:.0f}")
        assert own < 0.3 * size
        assert read == own
        assert peak < own + 0.15 * size
