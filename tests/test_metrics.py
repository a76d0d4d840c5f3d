"""Metrics: the lines, each step once after a resume, rates and FLOPs by the documented formulas, wandb offline."""

import errno
import io
import json
import math
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshtron.errors import MeshtronError
from meshtron.metrics import PEAK_FLOPS, MetricsWriter, StepMetrics, drop_later_steps, memory_gib, peak_flops
from meshtron.models.llama import Llama, LlamaConfig, flops_per_token

KEYS = [
    *("step", "tokens", "samples", "loss", "grad_norm", "lr", "tokens_per_s", "tokens_per_s_per_device"),
    *("mfu", "memory_gib", "data_wait_s", "step_s"),
]


def step(number, loss=2.5, peak=None):
    return StepMetrics.measured(
        step_tokens=1000,
        num_devices=4,
        flops_per_token=2e9,
        peak=peak,
        step=number,
        tokens=1000 * number,
        samples=10 * number,
        loss=loss,
        grad_norm=0.5,
        lr=1e-3,
        memory_gib=1.25,
        data_wait_s=0.01,
        step_s=0.5,
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_the_keys_of_the_contract_and_the_rates(tmp_path, capsys):
    with MetricsWriter(tmp_path, steps=100) as writer:
        writer.log(step(1, peak=1e13))
        writer.log(step(2), val_loss=3.0)
    first, second = lines(tmp_path)
    assert list(first) == KEYS
    assert list(second) == [*KEYS, "val_loss"]
    assert (first["tokens_per_s"], first["tokens_per_s_per_device"]) == (2000.0, 500.0)
    assert first["mfu"] == pytest.approx(500 * 2e9 / 1e13)
    assert second["mfu"] is None
    shown = capsys.readouterr().out.splitlines()
    assert "step   1/100  loss  2.5000" in shown[0]
    assert "mfu 10.0%" in shown[0]
    assert "mfu" not in shown[1]
    assert "val_loss 3.0000" in shown[1]


def test_a_loss_that_is_not_finite_is_null_so_that_every_line_is_json(tmp_path):
    with MetricsWriter(tmp_path, steps=10) as writer:
        writer.log(step(1, loss=math.nan))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["loss"] is None


def test_after_a_resume_each_step_is_there_once(tmp_path):
    with MetricsWriter(tmp_path, steps=10) as writer:
        for number in range(1, 8):
            writer.log(step(number))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "los')  # killed while writing
    with MetricsWriter(tmp_path, steps=10, resumed_step=5) as writer:
        for number in range(6, 9):
            writer.log(step(number, loss=1.0))
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 9))
    assert [line["loss"] for line in lines(tmp_path)] == [2.5] * 5 + [1.0] * 3
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]
    drop_later_steps(tmp_path / "metrics.jsonl", 0)
    assert lines(tmp_path) == []


def test_peaks_of_known_devices_only():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H200 NVL") == 835e12
    assert peak_flops("NVIDIA B200") == peak_flops("NVIDIA B300 SXM6 AC") == 2250e12
    assert peak_flops("NVIDIA GB200") == peak_flops("NVIDIA GB300") == 2500e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GeForce RTX 4090") is None
    # each entry is found by its own name: none is hidden behind an earlier, shorter one
    assert all(peak_flops(name) == peak for name, peak in PEAK_FLOPS.items())


def test_memory_counts_what_the_process_holds():
    before = memory_gib(torch.device("cpu"))
    block = torch.ones(2**28 // 4)  # a quarter GiB
    assert memory_gib(torch.device("cpu")) >= before
    assert memory_gib(torch.device("cpu")) > block.nbytes / 2**30


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_flops_per_token_are_those_that_torch_counts(kv_heads):
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
    )
    batch, sequence = 2, 24
    model = Llama(config)
    # torch's counter knows no cost for the CPU's fused attention; the plain kernel is matrix products that it counts
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.randint(config.vocab_size, (batch, sequence))).sum().backward()
    # Equal: what the formula leaves out (norms, rotary, softmax, activations) the counter does not count either.
    assert counter.get_total_flops() == flops_per_token(config, sequence) * batch * sequence


def test_wandb_offline_needs_no_login_and_tensorboard_writes_files(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with MetricsWriter(tmp_path, steps=10, wandb="offline", tensorboard=True, config={"a": 1}) as writer:
        writer.log(step(1))
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert list(tmp_path.glob("tensorboard/events.*"))


@pytest.mark.parametrize(
    ("module", "options"), [("wandb", {"wandb": "offline"}), ("torch.utils.tensorboard", {"tensorboard": True})]
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, module, options):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MeshtronError, match=r"pip install \"meshtron\["):
        MetricsWriter(tmp_path, steps=10, **options)
    assert not (tmp_path / "metrics.jsonl").exists()


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_refuses_the_log_is_one_line_with_path_and_reason(tmp_path):
    writer = MetricsWriter(tmp_path, steps=10)
    writer._file = FullDisk()
    with pytest.raises(MeshtronError, match=r"metrics\.jsonl: cannot be written: No space left on device"):
        writer.log(step(1))
