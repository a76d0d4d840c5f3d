"""Files of datatrove/nanotron and Megatron-LM, written here byte by byte as their formats say."""

import struct

import numpy as np
import pytest

from meshtron.data import Windows, open_source, open_tokens
from meshtron.errors import DataError

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 13, 0], [0], [300, 14, 0]]
ROW = [token for document in DOCUMENTS for token in document]
ENDS = np.cumsum([len(document) for document in DOCUMENTS]).tolist()


def write_ds(path, documents=DOCUMENTS, width=2, first_line="org/tokenizer|2", index=True):
    row = np.array([token for document in documents for token in document], dtype=f"<u{width}")
    path.write_bytes(row.tobytes())
    path.with_name(path.name + ".metadata").write_text(f"{first_line}\n{len(row)}\n{len(row)} T")
    if index:
        ends = np.cumsum([len(document) for document in documents])
        path.with_name(path.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    return path


def write_megatron(prefix, dtype="<u2", code=8, documents=((0, 1), (1, 2), (2, 4), (4, 5))):
    """Sequences are DOCUMENTS; ``documents`` says which of them make up each document."""
    data = np.array(ROW, dtype=dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(data.tobytes())
    sizes = [len(sequence) for sequence in DOCUMENTS]
    offsets = [data.itemsize * (end - size) for end, size in zip(ENDS, sizes, strict=True)]
    bounds = [0, *(last for _, last in documents)]
    content = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(bounds))
    content += struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(sizes)}q", *offsets)
    content += struct.pack(f"<{len(bounds)}q", *bounds)
    prefix.with_name(prefix.name + ".idx").write_bytes(content)
    return prefix


def row_of(tokens):
    return tokens.read(0, tokens.num_tokens).tolist()


@pytest.mark.parametrize(
    ("width", "first_line"), [(2, "gpt2|2"), (4, "org/name|4"), (2, "an older file"), (4, "an older file")]
)
def test_ds_file(tmp_path, width, first_line):
    tokens = open_tokens(write_ds(tmp_path / "a.ds", width=width, first_line=first_line))
    assert row_of(tokens) == ROW
    assert tokens.document_ends.tolist() == ENDS
    assert np.shares_memory(tokens.read(3, 5), tokens.read(0, 8))  # mapped, not copied


def test_folder_of_ds_files(tmp_path):
    write_ds(tmp_path / "b.ds", DOCUMENTS[3:])
    write_ds(tmp_path / "a.ds", DOCUMENTS[:3])
    tokens = open_tokens(tmp_path)
    assert row_of(tokens) == ROW
    assert tokens.document_ends.tolist() == ENDS
    assert tokens.locate(13) == f"{tmp_path / 'b.ds'}, token 1 (byte 2)"


def test_ds_without_index_packs_plainly_only(tmp_path):
    path = write_ds(tmp_path / "a.ds", index=False)
    assert len(open_source(path, seq_len=4, vocab_size=400).dataset) == 3
    with pytest.raises(DataError, match="needs a document index"):
        open_source(path, seq_len=4, vocab_size=400, packing="documents")


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5)])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_megatron(tmp_path, dtype, code, ending):
    prefix = write_megatron(tmp_path / "corpus_text.v1", dtype, code)
    tokens = open_tokens(str(prefix) + ending)
    assert row_of(tokens) == ROW
    assert tokens.document_ends.tolist() == [ENDS[0], ENDS[1], ENDS[3], ENDS[4]]
    sample = Windows(tokens, 4, "documents", vocab_size=400)[1]
    assert (sample.tokens.tolist(), sample.document_ids.tolist()) == (ROW[4:8], [0, 0, 1, 1])


def test_what_contradicts_itself_is_refused(tmp_path):
    path = write_ds(tmp_path / "a.ds")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"a.ds: 30 bytes, but a.ds.metadata says 16 tokens of 2 bytes"):
        open_tokens(path)
    write_ds(path, first_line="name|4")
    with pytest.raises(DataError, match="says 16 tokens of 4 bytes"):
        open_tokens(path)
    write_ds(path, first_line="name|3")
    with pytest.raises(DataError, match="expected the lines TOKENIZER"):
        open_tokens(path)
    write_ds(path)
    path.with_name("a.ds.index").write_bytes(struct.pack("<2Q", 4, 6))
    with pytest.raises(DataError, match=r"a.ds.index: ends at token 6, but a.ds has 16"):
        open_tokens(path)
    path.with_name("a.ds.metadata").unlink()
    with pytest.raises(DataError, match=r"a.ds.metadata: not there"):
        open_tokens(path)
    with pytest.raises(DataError, match=r"a.ds, token 13 \(byte 26\): id 300 is outside the vocabulary of 300"):
        open_source(write_ds(path), seq_len=4, vocab_size=300)

    prefix = write_megatron(tmp_path / "corpus", code=7)
    with pytest.raises(DataError, match="floats; expected version 1 and whole numbers"):
        open_tokens(prefix)
    write_megatron(prefix, code=4)  # two-byte ids that the index takes for four
    with pytest.raises(DataError, match="sequences do not follow one another"):
        open_tokens(prefix)
    write_megatron(prefix)
    index = prefix.with_name("corpus.idx")
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"corpus.idx: \d+ bytes, expected \d+ for 5 sequences"):
        open_tokens(prefix)
    index.write_bytes(b"something else")
    with pytest.raises(DataError, match="not an index of Megatron-LM"):
        open_tokens(prefix)
