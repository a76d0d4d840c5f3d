"""inspect_rank: one rank is looked at, the others wait as long as it takes."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

import meshtron as mt
from meshtron.testing import run_ranks

PROGRAM = """
import pathlib, torch, meshtron as mt
from meshtron.world import process_group
with process_group(torch.device("cpu")):
    rank = torch.distributed.get_rank()
    shard = torch.full((2,), float(rank))
    mt.inspect_rank()
    pathlib.Path(f"passed-{rank}").touch()
    total = shard.clone()
    torch.distributed.all_reduce(total)
    pathlib.Path(f"rank-{rank}").write_text(str(total.tolist()))
"""


def looked_at() -> tuple[list[int], float]:
    seen: list[int] = []
    mt.inspect_rank(1, lambda: (time.sleep(0.5), seen.append(dist.get_rank())))
    started = time.monotonic()
    mt.inspect_rank()  # MESHTRON_DEBUG_RANK is not set
    return seen, time.monotonic() - started


def test_only_the_rank_asked_for_looks():
    ranks = run_ranks(looked_at, 3)
    assert [seen for seen, _ in ranks] == [[], [1], []]
    assert all(idle < 0.1 for _, idle in ranks)


def no_such_rank() -> None:
    mt.inspect_rank(5)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(AssertionError, match=r"inspect_rank\(5\): there are 2 ranks"):
        run_ranks(no_such_rank, 2)


def two_ranks(folder: Path, **environment: str) -> dict[str, Any]:
    """What starts the program under torchrun, with an eye on its rank 1."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment |= {"MESHTRON_DEBUG_RANK": "1", "PYTHONPATH": str(Path(mt.__file__).parents[1])}
    return {
        "args": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)],
        "cwd": folder,
        "env": os.environ | environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        "text": True,
    }


def test_the_environment_names_a_rank_for_pdb_under_torchrun(tmp_path):
    done = subprocess.run(
        **two_ranks(tmp_path),
        input="p shard.tolist()\nn\np 'stepped', shard.tolist()\nb 10\nc\np 'broke', total.tolist()\nc\n",
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert "mt.inspect_rank()" in done.stdout  # pdb stands where the user's call stands
    assert "[1.0, 1.0]\n" in done.stdout
    assert "('stepped', [1.0, 1.0])" in done.stdout
    assert "('broke', [1.0, 1.0])" in done.stdout
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["[1.0, 1.0]"] * 2


class Editor:
    """What VSCode does, in a few words of the Debug Adapter Protocol."""

    def __init__(self, connect: dict[str, Any]) -> None:
        self._socket = socket.create_connection((connect["host"], connect["port"]), timeout=60)
        self._stream = self._socket.makefile("rwb")
        self._numbers = itertools.count(1)

    def send(self, command: str, **arguments: Any) -> int:
        number = next(self._numbers)
        request = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(request).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._stream.flush()
        return number

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        number = self.send(command, **arguments)
        return self._find(lambda message: message.get("request_seq") == number).get("body", {})

    def await_event(self, name: str) -> dict[str, Any]:
        return self._find(lambda message: message.get("event") == name).get("body", {})

    def stopped_at(self) -> tuple[str, int, int]:
        """Function and line where the program stops next, and the number of that frame."""
        stopped = self.await_event("stopped")
        frame = self.ask("stackTrace", threadId=stopped["threadId"])["stackFrames"][0]
        return frame["name"], frame["line"], frame["id"]

    def _find(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            headers = iter(self._stream.readline, b"\r\n")
            length = next(int(line.split(b":")[1]) for line in [*headers] if line.startswith(b"Content-Length"))
            message = json.loads(self._stream.read(length))
            if wanted(message):
                return message


def launch_json(port: int) -> dict[str, Any]:
    """The configuration in docs/your-model.md, with a free port."""
    page = (Path(__file__).parents[1] / "docs" / "your-model.md").read_text()
    (found,) = json.loads(page.split("```json\n")[1].split("```")[0])["configurations"]
    assert f"`MESHTRON_DEBUG_PORT={found['connect']['port']}`" in page
    found["connect"]["port"] = port
    return found


def test_an_editor_attaches_under_torchrun_and_stands_where_the_call_stands(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = launch_json(port)
    with subprocess.Popen(**two_ranks(tmp_path, MESHTRON_DEBUG_PORT=str(port)), stderr=subprocess.PIPE) as ranks:
        try:
            assert any("waiting for an editor" in line for line in ranks.stderr)
            with closing(Editor(settings["connect"])) as editor:
                looks_at_rank_1(editor, settings, tmp_path)
            assert ranks.wait(timeout=60) == 0
        finally:
            ranks.terminate()


def looks_at_rank_1(editor: Editor, settings: dict[str, Any], folder: Path) -> None:
    call = PROGRAM.splitlines().index("    mt.inspect_rank()") + 1
    editor.ask("initialize", adapterID=settings["type"])
    editor.send(settings["request"], **settings)
    editor.await_event("initialized")
    editor.ask("setBreakpoints", source={"path": str(folder / "program.py")}, breakpoints=[{"line": call + 4}])
    editor.ask("configurationDone")
    name, line, frame = editor.stopped_at()
    assert (name, line) == ("<module>", call)
    assert editor.ask("evaluate", expression="shard.tolist()", frameId=frame)["result"] == "[1.0, 1.0]"
    assert not (folder / "passed-0").exists()  # the other rank waits
    editor.send("next", threadId=1)
    assert editor.stopped_at()[:2] == ("<module>", call + 1)
    editor.send("continue", threadId=1)
    name, line, frame = editor.stopped_at()
    assert line == call + 4
    assert editor.ask("evaluate", expression="total.tolist()", frameId=frame)["result"] == "[1.0, 1.0]"
    editor.send("continue", threadId=1)


def test_a_port_that_cannot_be_had_is_refused(monkeypatch):
    monkeypatch.setenv("MESHTRON_DEBUG_PORT", "vscode")
    with pytest.raises(mt.MeshtronError, match="MESHTRON_DEBUG_PORT = 'vscode': expected the number of a free port"):
        mt.inspect_rank(0)


def test_an_environment_that_is_no_rank_is_refused(monkeypatch):
    monkeypatch.setenv("MESHTRON_DEBUG_RANK", "first")
    with pytest.raises(mt.LayoutError, match="MESHTRON_DEBUG_RANK = 'first': expected the number of a rank"):
        mt.inspect_rank()
