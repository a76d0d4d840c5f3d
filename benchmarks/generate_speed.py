"""Generation speed beside transformers' own `generate`: same random weights, same prompts, greedy, with a cache.

    python benchmarks/generate_speed.py                                       CPU, float32
    python benchmarks/generate_speed.py --device cuda --dtype bfloat16 --size 1b

Prints new tokens/s at batch 1 and 8, of the whole call and of decoding alone (the call less one that stops after the
first token), the best of several calls that take turns, and whether all tokens were equal. Needs transformers.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import transformers

from meshtron.generate.engine import PlacedModel, generate
from meshtron.hf.config import config_from_hf
from meshtron.models.llama import Llama

SIZES = {
    "30m": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
Call = tuple[str, int]
KV_HEADS = {"30m": 2, "135m": 3, "1b": 8, "8b": 8}


def models(
    size: str, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> tuple[PlacedModel, torch.nn.Module]:
    """The same random weights as our model and as transformers'."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, num_key_value_heads=KV_HEADS[size], max_position_embeddings=4096, **SIZES[size]
    )
    torch.manual_seed(0)
    with device:
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    sizes = config_from_hf(config.to_dict() | {"architectures": None}, "config")[1]
    with torch.device("meta"):
        ours = Llama(sizes)
    weights = {name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict(weights, assign=True)
    placed = PlacedModel(
        stages=[ours], vocab_size=vocab_size, hidden_size=sizes.hidden_size, max_length=sizes.max_position_embeddings
    )
    return placed, theirs


def best_seconds(calls: dict[Call, Callable[[], object]], repeats: int, device: torch.device) -> dict[Call, float]:
    """Shortest time of each call; they take turns, so that other load on the machine hits all alike."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first turn warms up
                best[name] = min(best[name], time.perf_counter() - started)
    return best


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--size", default="135m", choices=SIZES)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    placed, theirs = models(options.size, options.vocab_size, device, dtype)
    print(
        f"{options.size} Llama, {options.dtype} on {device}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {torch.get_num_threads()} threads; "
        f"{options.prompt_tokens} prompt tokens, {options.new_tokens} new"
    )
    print(f"{'batch':>5}  {'':<9}  {'meshtron':>9}  {'transformers':>12}  {'ratio':>5}  tokens")
    for batch in options.batch:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(0, options.vocab_size, (batch, options.prompt_tokens), generator=generator).to(device)
        results: dict[str, list[list[int]]] = {}

        def ours(new: int, prompts: torch.Tensor = prompts, results: dict = results) -> None:
            results["meshtron"] = generate(placed, prompts.tolist(), max_new_tokens=new)

        def others(new: int, prompts: torch.Tensor = prompts, results: dict = results) -> None:
            results["transformers"] = greedy_of_transformers(theirs, prompts, new)

        new = options.new_tokens
        calls = {
            (name, n): partial(call, n)
            for name, call in (("meshtron", ours), ("transformers", others))
            for n in (1, new)
        }
        best = best_seconds(calls, options.repeats, device)
        equal = "equal" if results["meshtron"] == results["transformers"] else "differ"
        for what in ("call", "decoding"):
            less = 0 if what == "call" else 1
            rates = [
                batch * (new - less) / (best[name, new] - less * best[name, 1])
                for name in ("meshtron", "transformers")
            ]
            print(
                f"{batch:>5}  {what:<9}  {rates[0]:>9.1f}  {rates[1]:>12.1f}  {rates[0] / rates[1]:>5.2f}  {equal}",
                flush=True,
            )


def greedy_of_transformers(model: torch.nn.Module, prompts: torch.Tensor, new: int) -> list[list[int]]:
    """transformers' greedy tokens, exactly ``new`` a row."""
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
    )
    return out[:, prompts.shape[1] :].tolist()


if __name__ == "__main__":
    main()
