"""Text in and out: prompts to ids, ids to completions, stop strings and streaming."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from meshtron.data.tokenizer import find_end_of_text, load_tokenizer
from meshtron.errors import DataError
from meshtron.hf.folder import stop_ids

_CONTEXT = 8  # prompt tokens decoded before a completion, so that a first space is kept or not as in the whole text
_UNFINISHED = "\ufffd"  # what decoding gives for a character whose last bytes are still to come


class Text:
    """A tokenizer, and what ends a completion.

    Args:
        tokenizer: encodes prompts, special tokens and all; adds those that its post-processor says.
        stop_ids: ids that end a completion.
        stop_strings: texts that end a completion and are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Iterable[int] = (), stop_strings: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.stop_strings = tuple(stop_strings)
        if "" in self.stop_strings:
            raise DataError("--stop needs some text")

    @classmethod
    def load(cls, path: Path, vocab_size: int, stop_strings: Sequence[str] = ()) -> "Text":
        """The tokenizer of a tokenizer.json or a folder, which also says what ends a text.

        Raises:
            DataError: there is no tokenizer, or it has more ids than the model has rows.
        """
        tokenizer = load_tokenizer(path, vocab_size)
        tokenizer.encode_special_tokens = False  # a prompt may hold special tokens, such as those of a chat
        folder = path if path.is_dir() else path.parent
        ends = stop_ids(folder)
        if not ends:  # and if the tokenizer has no such token, completions end by length
            end = find_end_of_text(tokenizer, path)
            ends = set() if end is None else {end}
        return cls(tokenizer, ends, stop_strings)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        return self.tokenizer.encode(text).ids

    def completion(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Text of the new tokens, without special tokens, up to the first stop string."""
        text = self._continuation(prompt, new)
        return text[: self._stop_position(text)]

    def finished(self, prompt: Sequence[int], new: Sequence[int]) -> bool:
        """Whether the newest token ends the completion."""
        if new[-1] in self.stop_ids:
            return True
        if not self.stop_strings:
            return False
        text = self._continuation(prompt, new)
        return self._stop_position(text) < len(text)

    def settled(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """The part of the completion that later tokens can no longer change, for printing as it grows."""
        text = self._continuation(prompt, new)
        end = self._stop_position(text)
        if end < len(text):
            return text[:end]
        text = text.rstrip(_UNFINISHED)
        held_back = max((_overlap(text, stop) for stop in self.stop_strings), default=0)
        return text[: len(text) - held_back]

    def _continuation(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        new = new[:-1] if new and new[-1] in self.stop_ids else new
        before = list(prompt[-_CONTEXT:])
        base, whole = self.tokenizer.decode(before), self.tokenizer.decode([*before, *new])
        return whole[len(base) :] if whole.startswith(base) else self.tokenizer.decode(list(new))

    def _stop_position(self, text: str) -> int:
        found = [position for stop in self.stop_strings if (position := text.find(stop)) >= 0]
        return min(found, default=len(text))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class Stream:
    """Writes a growing completion piece by piece.

    Args:
        write: receives each new piece of text.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        self.written = ""

    def update(self, text: str) -> None:
        """Write what ``text`` has beyond what was written."""
        if len(text) > len(self.written):
            self.write(text[len(self.written) :])
            self.written = text
