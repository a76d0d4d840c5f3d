"""How fast text becomes tokens and tokens become batches, and how much memory that takes:

1. ``meshtron prepare`` beside what the tokenizers library does alone, all documents in memory, in one batch call;
2. what a batch costs the loader, and how long a training loop of a given speed waits for it;
3. the same with a source that stalls for 50 ms now and then, as a shared file system does;
4. the most memory that ``meshtron prepare`` and its workers hold for one line of 50 MB and for two million documents
   of one word; the exit status is 1 if that is above the caps of docs/data.md.

    python benchmarks/data_speed.py [--megabytes 60] [--repeats 3] [--json FILE]

Text is Python source from the running interpreter's own packages. Ratios are of medians of runs that take turns, so
that a machine that is busy with other things slows both.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from meshtron.data import PrepareOptions, Source, Stage, TrainStream, load_tokenizer, open_source, prepare_corpus
from meshtron.data.samples import Sample
from meshtron.data.tokenizer import train_tokenizer

SEQ_LEN, BATCH, STEP_S = 4096, 16, 0.94  # one step of 64k tokens at 70k tokens/s, as on one GPU


def source_texts(megabytes: float) -> list[str]:
    """Python files, in the order of their paths, up to a size."""
    texts: list[str] = []
    size = 0
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue
        size += len(texts[-1])
        if size > megabytes * 1e6:
            break
    return [text for text in texts if text]


def prepare_beside_library(folder: Path, megabytes: float, vocab_size: int, repeats: int) -> dict[str, Any]:
    """MB/s and tokens/s of both, in turns."""
    texts = source_texts(megabytes)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts[:: max(1, len(texts) // 500)], vocab_size).save(str(folder / "tokenizer.json"))
    text_bytes = sum(len(text.encode()) for text in texts)
    tokens = 0

    def library(method: str) -> None:
        nonlocal tokens
        encodings = getattr(load_tokenizer(folder), method)(texts, add_special_tokens=False)
        tokens = sum(len(encoding) for encoding in encodings)

    def prepare() -> None:
        shutil.rmtree(folder / "tokens", ignore_errors=True)
        prepare_corpus([str(corpus)], folder / "tokens", PrepareOptions(tokenizer=str(folder)))

    ways: dict[str, Callable[[], None]] = {
        "tokenizers, encode_batch": lambda: library("encode_batch"),
        "tokenizers, encode_batch_fast": lambda: library("encode_batch_fast"),
        "meshtron prepare": prepare,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started, used = time.perf_counter(), sum(os.times()[:4])
            way()
            times[name].append(time.perf_counter() - started)
            cpu[name].append(sum(os.times()[:4]) - used)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    return {
        "documents": len(texts),
        "megabytes": text_bytes / 1e6,
        "tokens": tokens,
        "megabytes_per_s": {name: text_bytes / 1e6 / found for name, found in seconds.items()},
        "tokens_per_s": {name: tokens / found for name, found in seconds.items()},
        "cpu_s": {name: statistics.median(found) for name, found in cpu.items()},
        "seconds": times,
    }


class Stalling:
    """A dataset that takes 50 ms longer once in so many samples."""

    def __init__(self, dataset: Any, every: int, stall_s: float = 0.05) -> None:
        self.dataset, self.every, self.stall_s, self.calls = dataset, every, stall_s, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        self.calls += 1
        if self.calls % self.every == 0:
            time.sleep(self.stall_s)
        return self.dataset[index]


def batch_cost(folder: Path, packing: str) -> dict[str, float]:
    """Milliseconds to build one batch of 16 sequences of 4,096 tokens in one thread."""
    source = open_source(folder / "tokens", seq_len=SEQ_LEN, vocab_size=1 << 17, packing=packing)
    batch = min(BATCH, len(source.dataset))  # type: ignore[arg-type]
    with TrainStream(
        [Stage(seq_len=SEQ_LEN, sources=(source,))], global_batch_size=batch, seed=0, workers=0
    ) as stream:
        times = []
        for step in range(60):
            stream.batch(step * batch)
            times.append(stream.wait_s)
    median = statistics.median(times)
    return {"milliseconds": 1e3 * median, "tokens_per_s": batch * SEQ_LEN / median}


def waits(folder: Path, stall_every: int, workers: int, steps: int) -> Iterator[float]:
    """Seconds that each step of a loop that takes STEP_S waited for data."""
    source = open_source(folder / "tokens", seq_len=SEQ_LEN, vocab_size=1 << 17)
    dataset = Stalling(source.dataset, stall_every) if stall_every else source.dataset
    stages = [Stage(seq_len=SEQ_LEN, sources=(Source(key="data", dataset=dataset),))]
    with TrainStream(stages, global_batch_size=BATCH, seed=0, workers=workers, prefetch=4) as stream:
        for step in range(steps):
            stream.batch(step * BATCH)
            yield stream.wait_s
            time.sleep(STEP_S / 10)  # a tenth of the step: ten times harder than 70k tokens/s


def peak_memory(folder: Path, name: str, lines: Iterator[str]) -> float:
    """Most MiB that ``meshtron prepare`` and its workers held together, shared pages counted once (PSS)."""
    corpus = folder / f"{name}.jsonl"
    with corpus.open("w") as file:
        file.writelines(lines)
    command = [sys.executable, "-m", "meshtron", "prepare", str(corpus), "--out", str(folder / name)]
    process = psutil.Popen([*command, "--tokenizer", str(folder)], stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        held = 0
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                held += member.memory_full_info().pss
        peak = max(peak, held)
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"meshtron prepare failed on {corpus}")
    return peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=60, help="text to tokenize")
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
        found["prepare"] = prepare_beside_library(
            folder, arguments.megabytes, arguments.vocab_size, arguments.repeats
        )
        report_prepare(found["prepare"], found["cores"])
        found["batch"] = {packing: batch_cost(folder, packing) for packing in ("concat", "documents", "pad")}
        for packing, cost in found["batch"].items():
            print(f"a batch of {BATCH} x {SEQ_LEN} tokens, {packing}: {cost['milliseconds']:.2f} ms in one thread")
        found["wait"] = {}
        for stall_every in (0, 2 * BATCH):
            for workers in (0, 1, 2):
                seconds = list(waits(folder, stall_every, workers, steps=50))[5:]
                share = float(np.mean(seconds)) / (STEP_S / 10)
                stalls = "a stall of 50 ms every other batch" if stall_every else "no stalls"
                print(f"{stalls}, workers = {workers}: waits {1e3 * np.mean(seconds):.2f} ms, {share:.2%} of a step")
                found["wait"][f"{stalls}, workers = {workers}"] = share
        long = "some words in a row, and a line feed behind them\n" * 1_000_000
        cases = {
            "one line of 50 MB": (600, iter([json.dumps({"text": long}) + "\n"])),
            "2,000,000 documents of one word": (256, (f'{{"text": "word{n % 977}"}}\n' for n in range(2_000_000))),
        }
        found["memory_mib"], within = {}, True
        for number, (case, (cap_mib, lines)) in enumerate(cases.items()):
            peak = found["memory_mib"][case] = peak_memory(folder, f"memory-{number}", lines)
            within = within and peak <= cap_mib
            print(f"{case}: {peak:.0f} MiB at most, {found['cores']} workers included; the cap is {cap_mib} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    sys.exit(not within)


def report_prepare(found: dict[str, Any], cores: int) -> None:
    print(f"{found['documents']:,} documents, {found['megabytes']:.1f} MB, {found['tokens']:,} tokens, {cores} cores")
    mine = found["megabytes_per_s"]["meshtron prepare"]
    for name, speed in found["megabytes_per_s"].items():
        tokens_per_s = found["tokens_per_s"][name]
        print(
            f"{name:<30} {speed:7.2f} MB/s {tokens_per_s:>12,.0f} tokens/s, {found['cpu_s'][name]:.1f} s of CPU;  "
            f"prepare is {mine / speed:.0%} of it"
        )


if __name__ == "__main__":
    main()
